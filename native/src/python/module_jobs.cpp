// Bindings of what a save or restore is made of, and of the handles on them.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "base/fault.h"
#include "python/python_arguments.h"
#include "python/python_gil.h"
#include "python/python_jobs.h"
#include "python/python_support.h"

namespace datastates {
namespace {

bool is_constructed(PyObject* self) {
    auto* const instance = reinterpret_cast<py::detail::instance*>(self);
    return instance->get_value_and_holder().holder_constructed();
}

/// Lets Python's garbage collector see through a job to what it keeps alive, which may well hold
/// the job in turn.
template <typename Job>
py::custom_type_setup collectable() {
    return py::custom_type_setup([](PyHeapTypeObject* heap_type) {
        PyTypeObject& type = heap_type->ht_type;
        type.tp_flags |= Py_TPFLAGS_HAVE_GC;
        type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
#if PY_VERSION_HEX >= 0x03090000
            Py_VISIT(Py_TYPE(self));
#endif
            if (!is_constructed(self)) return 0;
            Py_VISIT(py::cast<Job&>(py::handle(self)).keepalive.ptr());
            return 0;
        };
        // Before its memory goes: of a cycle, all are finalized before any is cleared, and what the
        // job keeps alive may be cleared before the job.
        type.tp_finalize = [](PyObject* self) {
            if (is_constructed(self)) py::cast<Job&>(py::handle(self)).drop_handle();
        };
        type.tp_clear = [](PyObject* self) {
            if (!is_constructed(self)) return 0;
            py::cast<Job&>(py::handle(self)).keepalive = py::object();
            return 0;
        };
    });
}

template <typename Job>
auto handle_of(const Job& job) {
    auto handle = required(job.handle, "job");
    if (!handle) throw std::runtime_error("this job was garbage collected");
    return handle;
}

/// Whatever the text is, nothing of it may keep a job from failing.
std::string to_words(const py::str& text) {
    return py::bytes(text.attr("encode")("utf-8", "backslashreplace"));
}

/// Binds `fail` and `cancel`.
template <typename Job>
void bind_ends(py::class_<Job>& job) {
    job.def(
           "fail",
           [](const Job& self, const py::str& message, int error, const py::str& path) {
               const auto handle = handle_of(self);
               auto fault = not_transferred(to_words(message), error, to_words(path));
               const GilRelease release;
               handle->fail(std::move(fault));
           },
           py::arg("message"), py::arg("errno"), py::arg("path"))
        .def("cancel", [](const Job& self) {
            const auto handle = handle_of(self);
            const GilRelease release;
            handle->cancel();
        });
}

void bind_fault(const py::module_& module) {
    py::class_<Fault>(module, "Fault", py::is_final())
        .def_property_readonly("kind", [](const Fault& fault) { return kind_name(fault.kind); })
        .def_property_readonly("errno", [](const Fault& fault) { return fault.error; })
        .def_property_readonly("path", [](const Fault& fault) { return to_text(fault.path); })
        .def_readonly("offset", &Fault::offset)
        .def_readonly("operation", &Fault::operation)
        .def_property_readonly("message",
                               [](const Fault& fault) { return to_text(describe(fault)); })
        .def("__repr__", [](const Fault& fault) {
            return "Fault(" + std::string(kind_name(fault.kind)) + ": " + describe(fault) + ")";
        });
}

void bind_window(const py::module_& module) {
    py::class_<PyWindow>(module, "Window", py::is_final())
        .def(py::init([](double deadline) {
                 if (deadline < 0) {
                     throw py::value_error("deadline=" + std::to_string(deadline) + " is negative");
                 }
                 auto window = std::make_shared<Window>(after(deadline, "deadline"));
                 return std::make_unique<PyWindow>(std::move(window));
             }),
             py::arg("deadline"))
        .def("open", [](const PyWindow& self) {
            const GilRelease release;
            if (const auto window = self.window.get()) window->open();
        });
}

void bind_slab(const py::module_& module) {
    py::class_<PySlab>(module, "Slab", py::is_final(), py::buffer_protocol())
        .def_property_readonly(
            "address",
            [](const PySlab& slab) { return reinterpret_cast<std::uintptr_t>(slab.data); })
        .def_readonly("nbytes", &PySlab::nbytes)
        .def("release", [](PySlab& slab) { slab.lease.reset(); })
        .def("abandon",
             [](PySlab& slab) {
                 if (const auto lease = slab.lease.get()) lease->abandon();
                 slab.lease.reset();
             })
        .def_buffer([](PySlab& slab) {
            if (!slab.lease.get()) throw py::buffer_error("the slab was released");
            return py::buffer_info(reinterpret_cast<unsigned char*>(slab.data),
                                   static_cast<py::ssize_t>(slab.nbytes));
        });
}

void bind_save(const py::module_& module) {
    py::class_<SaveFile>(module, "SaveFile", py::is_final())
        .def(py::init([](const py::object& path, std::int64_t table_offset,
                         const Transfer& content) {
                 std::string name = path.is_none() ? "" : to_path(path);
                 if (name.empty() && !path.is_none()) throw py::value_error("path is empty");
                 return SaveFile(std::move(name), to_size(table_offset, "table_offset"), content);
             }),
             py::arg("path"), py::arg("table_offset"), py::arg("content"))
        .def_property_readonly("nbytes", &SaveFile::nbytes);

    py::class_<PySaveJob> job(module, "SaveJob", py::is_final(), collectable<PySaveJob>());
    bind_ends(job);
    job.def(
           "wait_read",
           [](const PySaveJob& self, Group group, double timeout) {
               if (group < kEveryGroup) {
                   throw py::value_error("group=" + std::to_string(group) + " is below -1");
               }
               const auto job = handle_of(self);
               return wait_in_slices(
                   timeout, [&](auto deadline) { return (*job)->wait_read(group, deadline); });
           },
           py::arg("group"), py::arg("timeout"))
        .def(
            "wait",
            [](const PySaveJob& self, double timeout) {
                const auto job = handle_of(self);
                return wait_in_slices(timeout,
                                      [&](auto deadline) { return (*job)->wait(deadline); });
            },
            py::arg("timeout"))
        .def(
            "wait_queued",
            [](const PySaveJob& self, Group group, double timeout) {
                if (group < 0) {
                    throw py::value_error("group=" + std::to_string(group) + " is negative");
                }
                const auto job = handle_of(self);
                return wait_in_slices(
                    timeout, [&](auto deadline) { return (*job)->wait_queued(group, deadline); });
            },
            py::arg("group"), py::arg("timeout"))
        .def(
            "events",
            [](const PySaveJob& self, Group group) {
                std::vector<std::unique_ptr<PyDeviceEvent>> events;
                for (auto& event : (*handle_of(self))->events(group)) {
                    events.push_back(std::make_unique<PyDeviceEvent>(std::move(event)));
                }
                return events;
            },
            py::arg("group"))
        .def(
            "stream",
            [](const PySaveJob& self, std::size_t file) {
                return std::make_unique<PyItems<Piece>>(
                    [job = handle_of(self)->job(), file](auto deadline) {
                        return job->take(file, deadline);
                    });
            },
            py::arg("file"))
        .def(
            "stored",
            [](const PySaveJob& self, std::size_t file) {
                const auto job = handle_of(self);
                const GilRelease release;
                (*job)->stored(file);
            },
            py::arg("file"))
        .def(
            "checksums",
            [](const PySaveJob& self, std::size_t file) {
                const auto job = handle_of(self);
                const auto words = std::as_bytes(std::span((*job)->checksums(file)));
                return py::bytes(reinterpret_cast<const char*>(words.data()), words.size());
            },
            py::arg("file"))
        .def_property_readonly("fault",
                               [](const PySaveJob& self) { return (*handle_of(self))->fault(); })
        .def_property_readonly(
            "difference",
            [](const PySaveJob& self)
                -> std::optional<std::tuple<std::size_t, std::uint64_t, std::uint64_t>> {
                const auto found = (*handle_of(self))->difference();
                if (!found) return std::nullopt;
                return std::tuple(found->tensor, found->begin, found->end);
            })
        .def_property_readonly(
            "bytes_read", [](const PySaveJob& self) { return (*handle_of(self))->bytes_read(); })
        .def_property_readonly(
            "bytes_written",
            [](const PySaveJob& self) { return (*handle_of(self))->bytes_written(); })
        .def_property_readonly("direct",
                               [](const PySaveJob& self) { return (*handle_of(self))->direct(); })
        .def_property_readonly(
            "read_seconds",
            [](const PySaveJob& self) { return (*handle_of(self))->read_seconds(); })
        .def_property_readonly(
            "total_seconds",
            [](const PySaveJob& self) { return (*handle_of(self))->total_seconds(); })
        .def_property_readonly("cache_seconds", [](const PySaveJob& self) {
            return (*handle_of(self))->cache_seconds();
        });
}

void bind_restore(const py::module_& module) {
    py::class_<RestorePlan>(module, "RestorePlan", py::is_final())
        .def(py::init<>())
        .def(
            "add_file",
            [](RestorePlan& plan, const py::object& path, std::int64_t nbytes,
               std::int64_t table_offset, const Transfer& content) {
                plan.files.emplace_back(to_path(path), to_size(nbytes, "nbytes"),
                                        to_size(table_offset, "table_offset"), content);
            },
            py::arg("path"), py::arg("nbytes"), py::arg("table_offset"), py::arg("content"));

    py::class_<PyRestoreJob> job(module, "RestoreJob", py::is_final(), collectable<PyRestoreJob>());
    bind_ends(job);
    job.def(
           "wait",
           [](const PyRestoreJob& self, double timeout) {
               const auto job = handle_of(self);
               return wait_in_slices(timeout,
                                     [&](auto deadline) { return (*job)->wait(deadline); });
           },
           py::arg("timeout"))
        .def("requests",
             [](const PyRestoreJob& self) {
                 using Item = std::optional<Result<std::shared_ptr<ReadRequest>>>;
                 return std::make_unique<PyItems<ReadRequest>>(
                     [take = handle_of(self)->requests()](auto deadline) -> Item {
                         auto request = take(deadline);
                         if (!request) return std::nullopt;
                         return Result(*std::move(request));
                     });
             })
        .def_property_readonly("fault",
                               [](const PyRestoreJob& self) { return (*handle_of(self))->fault(); })
        .def_property_readonly("bytes_read", [](const PyRestoreJob& self) {
            return (*handle_of(self))->bytes_read();
        });
}

}  // namespace

void bind_jobs(const py::module_& module) {
    bind_fault(module);
    bind_window(module);
    bind_slab(module);
    bind_save(module);
    bind_restore(module);
}

}  // namespace datastates
