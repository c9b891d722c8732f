// Bindings of Engine.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <new>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "files/watched_file_ops.h"
#include "memory/gather.h"
#include "pipeline/engine.h"
#include "python/python_arguments.h"
#include "python/python_gil.h"
#include "python/python_jobs.h"
#include "python/python_support.h"

namespace datastates {
namespace {

/// The engine, or RuntimeError if it cannot be used any more.
std::shared_ptr<Engine> usable(const PyEngine& self) {
    auto engine = required(self.engine, "engine");
    if (!engine->alive()) throw std::runtime_error("the engine is shut down");
    return engine;
}

std::size_t thread_count(std::int64_t value, const char* name) {
    if (value < 1)
        throw py::value_error(std::string(name) + "=" + std::to_string(value) + " is less than 1");
    return static_cast<std::size_t>(value);
}

IoPriority to_io_priority(const std::string& name) {
    if (name == "normal") return IoPriority::kNormal;
    if (name == "low") return IoPriority::kLow;
    if (name == "idle") return IoPriority::kIdle;
    throw py::value_error("io_priority='" + name + "' is not normal, low or idle");
}

[[noreturn]] void raise_memory_error(std::int64_t host_cache_bytes) {
    PyErr_Format(PyExc_MemoryError, "a host cache of %lld bytes cannot be mapped",
                 static_cast<long long>(host_cache_bytes));
    throw py::error_already_set();
}

std::unique_ptr<PyEngine> make_engine(std::int64_t host_cache_bytes, std::int64_t copy_threads,
                                      std::int64_t flush_threads, std::int64_t restore_threads,
                                      std::int64_t copy_rate, std::int64_t write_rate,
                                      const std::string& io_priority,
                                      std::shared_ptr<Failpoints> failpoints,
                                      std::string trace_path) {
    const ThreadCounts threads{.copy = thread_count(copy_threads, "copy_threads"),
                               .flush = thread_count(flush_threads, "flush_threads"),
                               .restore = thread_count(restore_threads, "restore_threads")};
    const std::uint64_t nbytes = to_size(host_cache_bytes, "host_cache_bytes");
    const Limits limits{.copy_rate = to_size(copy_rate, "copy_rate"),
                        .write_rate = to_size(write_rate, "write_rate"),
                        .io_priority = to_io_priority(io_priority)};
    auto ops = watched_file_ops(posix_file_ops(), {.failpoints = std::move(failpoints),
                                                   .trace_path = std::move(trace_path)});
    try {
        return std::make_unique<PyEngine>(std::make_shared<Engine>(
            nbytes, threads, std::move(ops), nullptr, Patience::kDefault, limits));
    } catch (const std::bad_alloc&) {
        raise_memory_error(host_cache_bytes);
    }
}

void grow(const PyEngine& self, std::int64_t host_cache_bytes) {
    const auto engine = usable(self);
    const std::uint64_t nbytes = to_size(host_cache_bytes, "host_cache_bytes");
    try {
        const GilRelease release;
        engine->grow(nbytes);
    } catch (const std::bad_alloc&) {
        raise_memory_error(host_cache_bytes);
    }
}

std::unique_ptr<PySlab> make_slab(const PyEngine& self, std::int64_t nbytes, std::int64_t order,
                                  double timeout) {
    using State = HostCache::SlabRequest::State;
    const auto engine = usable(self);
    HostCache::SlabRequest request(engine->shared_cache(), to_size(nbytes, "nbytes"),
                                   to_size(order, "order"));
    auto state = State::kWaiting;
    wait_in_slices(timeout, [&](auto deadline) {
        state = request.wait_until(deadline);
        return state != State::kWaiting;
    });
    if (state == State::kClosed) throw std::runtime_error("the engine is shut down");
    if (state != State::kGranted) return nullptr;
    return std::make_unique<PySlab>(std::make_shared<Lease>(request.take()),
                                    static_cast<std::uint64_t>(nbytes));
}

void gather_into(const PyEngine& self, const Transfer& transfer, std::uint64_t address,
                 std::int64_t nbytes) {
    usable(self);
    const StreamContent content(transfer);
    if (content.end() > to_size(nbytes, "nbytes")) {
        throw py::value_error("a region ends at " + std::to_string(content.end()) +
                              ", beyond nbytes=" + std::to_string(nbytes));
    }
    if (address == 0 && content.nbytes() > 0) throw py::value_error("address is null");
    if (content.nbytes() <= kReleaseGilBytes) {
        gather(content, to_address(address));
        return;
    }
    const GilRelease release;
    gather(content, to_address(address));
}

std::unique_ptr<PySaveJob> save(const PyEngine& self, const std::vector<SaveFile>& files,
                                const py::sequence& sync_directories, std::int64_t order,
                                const PyWindow& window, py::object keepalive,
                                const PyFences& fences, std::shared_ptr<ExpectedBytes> expected) {
    const auto engine = usable(self);
    auto events = to_fences(fences);
    auto directories = to_paths(sync_directories);
    const auto number = to_size(order, "order");
    const auto opens = required(window.window, "window");
    auto handle = [&] {
        const GilRelease release;  // a job of many regions takes a while to make
        return engine->save(files, std::move(directories), number, opens, std::move(events),
                            std::move(expected));
    }();
    return std::make_unique<PySaveJob>(std::move(handle), std::move(keepalive));
}

std::unique_ptr<PySaveJob> save_streamed(const PyEngine& self, const std::vector<SaveFile>& files,
                                         std::int64_t order, const PyWindow& window,
                                         py::object keepalive, const PyFences& fences,
                                         std::shared_ptr<ExpectedBytes> expected) {
    const auto engine = usable(self);
    auto events = to_fences(fences);
    const auto number = to_size(order, "order");
    const auto opens = required(window.window, "window");
    auto handle = [&] {
        const GilRelease release;
        return engine->save_streamed(files, number, opens, std::move(events), std::move(expected));
    }();
    return std::make_unique<PySaveJob>(std::move(handle), std::move(keepalive));
}

template <auto Restore>
std::unique_ptr<PyRestoreJob> restore(const PyEngine& self, const RestorePlan& plan,
                                      py::object keepalive, const PyFences& fences) {
    const auto engine = usable(self);
    auto events = to_fences(fences);
    auto handle = [&] {
        const GilRelease release;
        return (*engine.*Restore)(plan.files, std::move(events));
    }();
    return std::make_unique<PyRestoreJob>(std::move(handle), std::move(keepalive));
}

void open_device(const PyEngine& self, int device) {
    const auto engine = usable(self);
    value_or_raise([&] {
        const GilRelease release;
        return engine->devices().open(device);
    }());
}

std::shared_ptr<Device> device_of(const Engine& engine, int device) {
    auto found = engine.devices().find(device);
    if (!found) throw py::value_error("device " + std::to_string(device) + " was not opened");
    return found;
}

std::unique_ptr<PyDeviceEvent> record_event(const PyEngine& self, int device, StreamHandle stream) {
    const auto of = device_of(*usable(self), device);
    return std::make_unique<PyDeviceEvent>(value_or_raise([&] {
        const GilRelease release;
        return of->record(stream);
    }()));
}

/// What comes after the copies, if any may be under way; and why not all of them are.
std::tuple<std::unique_ptr<PyDeviceEvent>, std::optional<Fault>> copy_to_host(
    const PyEngine& self, const Transfer& transfer, std::uint64_t address, std::int64_t nbytes,
    int device, StreamHandle stream) {
    const auto engine = usable(self);
    const StreamContent content(transfer);
    if (content.end() > to_size(nbytes, "nbytes")) {
        throw py::value_error("a region ends at " + std::to_string(content.end()) +
                              ", beyond nbytes=" + std::to_string(nbytes));
    }
    if (address == 0) throw py::value_error("address is null");
    auto [status, done] = [&] {
        const GilRelease release;  // into memory that is not pinned, copies wait
        return engine->copy_to_host(content, to_address(address), device, stream);
    }();
    std::optional<Fault> fault;
    if (!status.ok()) fault = std::move(status).fault();
    return {done ? std::make_unique<PyDeviceEvent>(std::move(done)) : nullptr, std::move(fault)};
}

}  // namespace

void bind_engine(const py::module_& module) {
    py::class_<CacheStats>(module, "CacheStats", py::is_final())
        .def_readonly("total_segments", &CacheStats::total_segments)
        .def_readonly("free_segments", &CacheStats::free_segments)
        .def_readonly("slab_segments", &CacheStats::slab_segments)
        .def_readonly("waiting", &CacheStats::waiting)
        .def_readonly("returned_segments", &CacheStats::returned_segments);

    const ThreadCounts defaults;
    py::class_<PyEngine>(module, "Engine", py::is_final())
        .def(py::init(&make_engine), py::arg("host_cache_bytes"),
             py::arg("copy_threads") = defaults.copy, py::arg("flush_threads") = defaults.flush,
             py::arg("restore_threads") = defaults.restore, py::arg("copy_rate") = 0,
             py::arg("write_rate") = 0, py::arg("io_priority") = "normal",
             py::arg("failpoints") = nullptr, py::arg("trace_path") = "")
        .def("grow", &grow, py::arg("host_cache_bytes"))
        .def_property_readonly("host_cache_bytes",
                               [](const PyEngine& self) {
                                   const auto engine = required(self.engine, "engine");
                                   return engine->cache().stats().total_segments * kSegmentBytes;
                               })
        .def_property_readonly("max_slab_bytes",
                               [](const PyEngine& self) {
                                   return required(self.engine, "engine")->cache().max_slab_bytes();
                               })
        .def("stats",
             [](const PyEngine& self) { return required(self.engine, "engine")->cache().stats(); })
        .def("slab", &make_slab, py::arg("nbytes"), py::arg("order"), py::arg("timeout"))
        .def("gather", &gather_into, py::arg("content"), py::arg("address"), py::arg("nbytes"))
        .def("save", &save, py::arg("files"), py::arg("sync_directories"), py::arg("order"),
             py::arg("window"), py::arg("keepalive"), py::arg("fences") = PyFences(),
             py::arg("expected") = nullptr)
        .def("save_streamed", &save_streamed, py::arg("files"), py::arg("order"), py::arg("window"),
             py::arg("keepalive"), py::arg("fences") = PyFences(), py::arg("expected") = nullptr)
        .def("restore", &restore<&Engine::restore>, py::arg("plan"), py::arg("keepalive"),
             py::arg("fences") = PyFences())
        .def("restore_streamed", &restore<&Engine::restore_streamed>, py::arg("plan"),
             py::arg("keepalive"), py::arg("fences") = PyFences())
        .def("open_device", &open_device, py::arg("device"))
        .def("limit_patience",
             [](const PyEngine& self) {
                 required(self.engine, "engine")->devices().limit_patience();
             })
        .def("record_event", &record_event, py::arg("device"), py::arg("stream"))
        .def("copy_to_host", &copy_to_host, py::arg("content"), py::arg("address"),
             py::arg("nbytes"), py::arg("device"), py::arg("stream"))
        .def_property_readonly(
            "devices_prepared",
            [](const PyEngine& self) {
                return required(self.engine, "engine")->devices().pinner().idle();
            })
        .def_property_readonly(
            "pinned_bytes",
            [](const PyEngine& self) {
                return required(self.engine, "engine")->devices().pinner().pinned_bytes();
            })
        .def_property_readonly(
            "pin_fault",
            [](const PyEngine& self) {
                return required(self.engine, "engine")->devices().pinner().fault();
            })
        .def_property_readonly(
            "node_fault",
            [](const PyEngine& self) {
                return required(self.engine, "engine")->devices().pinner().node_fault();
            })
        .def("keep_memory",
             [](const PyEngine& self) { required(self.engine, "engine")->cache().keep(); })
        .def(
            "shutdown",
            [](const PyEngine& self, double timeout) {
                const auto engine = required(self.engine, "engine");
                const auto patience = after(timeout, "timeout") - Clock::now();
                std::vector<std::string> held_up;
                {
                    const GilRelease release;
                    held_up = engine->shutdown(patience);
                }
                py::list names;
                for (const std::string& name : held_up) names.append(to_text(name));
                return names;
            },
            py::arg("timeout") = 10.0)
        .def_property_readonly("alive", [](const PyEngine& self) {
            const auto engine = self.engine.get();
            return engine != nullptr && engine->alive();
        });
}

}  // namespace datastates
