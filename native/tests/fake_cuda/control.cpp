// What tests arrange and ask.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string_view>
#include <utility>

#include "driver.h"
#include "fake_cuda.h"

namespace {

namespace cuda = datastates::cuda;
using namespace datastates::fake_cuda;

Driver& driver() {
    return Driver::instance();
}

/// Calls `body` with a stream of `device`, of the training process, which is given so many
/// commands.
template <typename Body>
int with_stream(int device, Handle handle, std::uint64_t commands, const Body& body) {
    return driver().train(device, [&](Driver& all, Caller& caller) -> cuda::Result {
        if (commands > 0) all.await_room(caller, device, commands);
        Stream* const stream = all.streams.stream(device, handle);
        if (stream == nullptr || stream->device != device) return cuda::kInvalidHandle;
        return body(all, caller, *stream);
    });
}

Clock::time_point after(double seconds) {
    constexpr double kLongest = 1e6;
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(
                              std::chrono::duration<double>(std::min(seconds, kLongest)));
}

}  // namespace

void fake_cuda_reset() {
    driver().reset();
}

void fake_cuda_configure(int devices, uint64_t seed, uint32_t max_delay_us, uint64_t piece_nbytes) {
    driver().arrange([&](Driver& all) {
        Scheduler::Manners manners = all.scheduler.manners();
        if (devices != 0) all.devices = std::max(devices, 0);
        if (seed != 0) manners.seed = seed;
        if (max_delay_us != 0) {
            manners.max_delay =
                std::chrono::microseconds(max_delay_us == UINT32_MAX ? 0 : max_delay_us);
        }
        if (piece_nbytes != 0) manners.piece_nbytes = piece_nbytes;
        all.scheduler.set(manners);
    });
}

void fake_cuda_set_version(int version) {
    driver().arrange([&](Driver& all) { all.version = version; });
}

void fake_cuda_set_attribute(int attribute, int value) {
    driver().arrange([&](Driver& all) { all.attributes[attribute] = value; });
}

void* fake_cuda_alloc(int device, uint64_t nbytes) {
    return driver().arrange([&](Driver& all) -> void* {
        if (device < 0 || device >= all.devices) return nullptr;
        return all.memory.allocate(device, nbytes);
    });
}

int fake_cuda_free(void* data) {
    return driver().arrange(
        [&](Driver& all) { return all.memory.free(data) ? cuda::kSuccess : cuda::kInvalidValue; });
}

int fake_cuda_adopt(int device, void* data, uint64_t nbytes) {
    return driver().arrange([&](Driver& all) {
        if (device < 0 || device >= all.devices) return cuda::kInvalidDevice;
        all.memory.adopt(device, addresses_of(data, nbytes));
        return cuda::kSuccess;
    });
}

int fake_cuda_disown(void* data) {
    return driver().arrange([&](Driver& all) {
        return all.memory.disown(addresses_of(data, 0).begin) ? cuda::kSuccess
                                                              : cuda::kInvalidValue;
    });
}

int fake_cuda_is_registered(const void* data, uint64_t nbytes) {
    return driver().arrange([&](Driver& all) {
        std::shared_ptr<Registration> found;
        constexpr int kNone = -1;  // portable memory only
        static_cast<void>(all.memory.find_pinned(kNone, addresses_of(data, nbytes), found));
        return found != nullptr ? 1 : 0;
    });
}

int fake_cuda_create_stream(int device, int blocking, uintptr_t* stream) {
    return driver().train(device, [&](Driver& all, Caller&) {
        *stream = all.streams.add_stream(device, blocking != 0, false);
        return cuda::kSuccess;
    });
}

int fake_cuda_create_foreign_stream(int device, uintptr_t* stream) {
    return driver().train(device, [&](Driver& all, Caller&) {
        *stream = all.streams.add_stream(device, false, false);
        all.streams.stream(device, *stream)->foreign = true;
        return cuda::kSuccess;
    });
}

int fake_cuda_destroy_stream(uintptr_t stream) {
    return driver().arrange([&](Driver& all) {
        all.streams.remove_stream(stream);
        return cuda::kSuccess;
    });
}

int fake_cuda_launch(int device, uintptr_t stream, void (*kernel)(void*), void* argument) {
    return with_stream(device, stream, 1, [&](Driver& all, Caller&, Stream& of) {
        auto work = std::make_shared<Work>();
        work->kernel = [kernel, argument] { kernel(argument); };
        return all.streams.enqueue(of, work);
    });
}

int fake_cuda_write(int device, uintptr_t stream, void* to, const void* from, uint64_t nbytes) {
    auto work = std::make_shared<Work>();
    work->written.resize(nbytes);
    if (nbytes > 0) std::memcpy(work->written.data(), from, nbytes);
    work->copies.push_back(
        {.to = static_cast<std::byte*>(to), .from = work->written.data(), .nbytes = nbytes});
    return with_stream(device, stream, 1, [&](Driver& all, Caller&, Stream& of) -> cuda::Result {
        if (!all.memory.is_of_device(device, addresses_of(to, nbytes))) return cuda::kInvalidValue;
        return all.streams.enqueue(of, work);
    });
}

int fake_cuda_synchronize(int device, uintptr_t stream, double timeout_s) {
    return with_stream(device, stream, 0, [&](Driver& all, Caller& caller, Stream& of) {
        const WorkPointer last = of.last;  // the stream may be destroyed while we wait
        caller.passage = {};               // a real driver waits without its lock
        const bool done = all.scheduler.wait_until(caller.lock, last, after(timeout_s));
        return done ? all.poison : cuda::kNotReady;
    });
}

int fake_cuda_synchronize_all(double timeout_s) {
    return driver().synchronize_all(after(timeout_s));
}

int fake_cuda_begin_capture(int device, uintptr_t stream, int mode) {
    return with_stream(device, stream, 0, [&](Driver& all, Caller&, Stream& of) -> cuda::Result {
        if (stream <= 1 || of.capture) return cuda::kCaptureUnsupported;
        if (mode < cuda::kCaptureGlobal || mode > cuda::kCaptureRelaxed) return cuda::kInvalidValue;
        all.streams.begin_capture(of, mode);
        return cuda::kSuccess;
    });
}

int fake_cuda_end_capture(int device, uintptr_t stream) {
    return with_stream(device, stream, 0, [&](Driver& all, Caller&, Stream& of) {
        return all.streams.end_capture(of);
    });
}

int fake_cuda_capture_invalidated(int device, uintptr_t stream) {
    return driver().arrange([&](Driver& all) {
        const Stream* const of = all.streams.stream(device, stream);
        return of != nullptr && of->capture && of->capture->invalidated ? 1 : 0;
    });
}

int fake_cuda_fail_next(const char* symbol, int code, int skip) {
    return driver().arrange([&](Driver& all) {
        if (!all.is_known(symbol)) return cuda::kNotFound;
        all.fail_next(symbol, code, skip);
        return cuda::kSuccess;
    });
}

void fake_cuda_poison(int code) {
    driver().arrange([&](Driver& all) {
        all.poison = code;
        if (code != cuda::kSuccess) all.scheduler.drop_all();
    });
}

void fake_cuda_stall(int on) {
    driver().arrange([&](Driver& all) { all.scheduler.stall(on != 0); });
}

int fake_cuda_be_hostile(const char* way, uint64_t value) {
    return driver().arrange(
        [&](Driver& all) { return all.be_hostile(way, value) ? cuda::kSuccess : cuda::kNotFound; });
}

void fake_cuda_watch_interpreter(int (*held)()) {
    driver().watch_interpreter(held);
}

void fake_cuda_hide(const char* symbol) {
    driver().arrange([&](Driver& all) { all.hidden.emplace(symbol); });
}

void fake_cuda_show_accesses(int on) {
    driver().arrange([&](Driver& all) {
        Scheduler::Manners manners = all.scheduler.manners();
        manners.show_accesses = on != 0;
        all.scheduler.set(manners);
    });
}

uint64_t fake_cuda_count(const char* what) {
    return driver().arrange([&](Driver& all) -> uint64_t {
        const std::string_view name = what;
        if (all.is_known(name)) return all.calls_of(name);
        const auto us = [](Clock::duration time) {
            return static_cast<uint64_t>(
                std::chrono::duration_cast<std::chrono::microseconds>(time).count());
        };
        uint64_t most_commands = 0;
        uint64_t most_bytes = 0;
        for (int device = 0; device < all.devices; ++device) {
            most_commands = std::max(most_commands, all.scheduler.queue(device).most_of_engine);
            most_bytes = std::max(most_bytes, all.scheduler.queue(device).most_engine_bytes);
        }
        const std::array<std::pair<std::string_view, uint64_t>, 19> counts{{
            {"bytes_to_host", all.counts.bytes_to_host},
            {"bytes_to_device", all.counts.bytes_to_device},
            {"copies", all.counts.copies},
            {"pageable_copies", all.counts.pageable_copies},
            {"violations", all.counts.violations},
            {"early_unregistrations", all.counts.early_unregistrations},
            {"live_streams", all.streams.live_streams()},
            {"live_events", all.streams.live_events()},
            {"live_registrations", all.memory.registrations()},
            {"pending", all.scheduler.pending()},
            {"captured", all.streams.captured()},
            {"training_wait_us", us(all.door.longest_wait())},
            {"held_interpreter", all.held_interpreter},
            {"pages_faulted_in", all.pinning.pages_faulted_in},
            {"hasty_pins", all.pinning.hasty},
            {"near_pins", all.pinning.near},
            {"most_commands", most_commands},
            {"most_bytes", most_bytes},
        }};
        for (const auto& [known, count] : counts) {
            if (known == name) return count;
        }
        return UINT64_MAX;
    });
}

int fake_cuda_context_references(int device) {
    return driver().arrange([&](Driver& all) { return all.streams.context(device).references; });
}

uint64_t fake_cuda_contexts_created(int device) {
    return driver().arrange([&](Driver& all) { return all.streams.context(device).created; });
}
