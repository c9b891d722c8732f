#include "driver.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "base/immovable.h"

namespace datastates::fake_cuda {
namespace {

/// All that are exported and counted.
constexpr std::array<std::string_view, 25> kSymbols{
    "cuInit",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDriverGetVersion",
    "cuGetProcAddress",
    "cuGetProcAddress_v2",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
};

/// What concerns the calling thread alone succeeds after a sticky error, too.
bool is_of_threads(std::string_view symbol) {
    return symbol == "cuCtxPushCurrent_v2" || symbol == "cuCtxPopCurrent_v2" ||
           symbol == "cuThreadExchangeStreamCaptureMode";
}

/// Runs when the process ends, or the library is unloaded.
struct AtExit : Immovable {
    ~AtExit() { Driver::instance().end(); }
};

}  // namespace

Driver::Driver() : process_(::getpid()) {
    for (const std::string_view symbol : kSymbols) calls_.emplace(symbol, 0);
    if (hostile_by_environment()) be_hostile("all", 1);
}

Driver& Driver::instance() {
    struct Maker : Driver {};
    static Driver* const driver = std::make_unique<Maker>().release();
    static const AtExit at_exit;
    return *driver;
}

std::map<int, int> Driver::usual_attributes() {
    return {{cuda::kHostNumaId, 0}};
}

bool Driver::is_of_this_process() const {
    return ::getpid() == process_;
}

ThreadState& Driver::this_thread() const {
    thread_local ThreadState state;
    if (state.epoch != epoch_) state = {.epoch = epoch_, .contexts = {}};
    return state;
}

cuda::Result Driver::admit(const char* symbol, Needs needs, Caller& caller) {
    ++calls_.find(symbol)->second;
    if (const auto found = failures_.find(symbol); found != failures_.end()) {
        auto& [code, skip] = found->second.front();
        if (skip-- == 0) {
            const cuda::Result failed = code;
            found->second.erase(found->second.begin());
            if (found->second.empty()) failures_.erase(found);
            return failed;
        }
    }
    if (needs == Needs::kNothing) return cuda::kSuccess;
    const bool ends_here = poison == cuda::kDeinitialized || !is_of_threads(symbol);
    if (poison != cuda::kSuccess && ends_here) return poison;
    if (!initialized) return cuda::kNotInitialized;
    if (needs == Needs::kInitialized) return cuda::kSuccess;
    const auto& contexts = this_thread().contexts;
    if (contexts.empty()) return cuda::kInvalidContext;
    return streams.device_of(contexts.back(), caller.device);
}

void Driver::fail_next(std::string_view symbol, cuda::Result code, int skip) {
    failures_[std::string(symbol)].push_back({.code = code, .skip = skip});
}

bool Driver::be_hostile(std::string_view way, std::uint64_t value) {
    const bool all = way == "all";
    const auto is = [&](std::string_view name) { return all || way == name; };
    const auto like_a_real_one = [&](std::uint64_t real) {
        return all && value > 0 ? real : value;
    };
    bool known = false;
    const auto set = [&](std::string_view name, auto& what, auto to) {
        if (!is(name)) return;
        known = true;
        what = to;
    };
    bool lock = false;
    set("lock", lock, value > 0);
    if (known) door.close(lock);
    set("queue", hostility.queue, like_a_real_one(1024));
    set("drain", hostility.drain, value > 0);
    // A real one clears and pins some GB/s where pages are small.
    set("pin_ns", hostility.pin_page, std::chrono::nanoseconds(like_a_real_one(1000)));
    set("lie_us", hostility.lie, std::chrono::microseconds(like_a_real_one(300)));
    set("context", hostility.context, value > 0);
    set("engines", hostility.engines, value > 0);
    scheduler.use_engines(hostility.engines);
    return known;
}

void Driver::await_room(Caller& caller, int device, std::uint64_t commands) {
    const std::uint64_t bound = hostility.queue;
    if (bound == 0) return;
    const auto has_room = [&](const Scheduler::Queue& queue) {
        const std::uint64_t waiting = queue.training + queue.engine;
        return waiting == 0 || waiting + commands <= bound;
    };
    const Scheduler::Queue& queue = scheduler.queue(device);
    if (has_room(queue)) return;
    // A training process that fills the queue by itself waits for itself.
    const bool by_engine = queue.training + (caller.engines ? 0 : commands) <= bound;
    caller.passage.blame_engine(by_engine);
    const auto began = Clock::now();
    scheduler.wait_for_queue(caller.lock, device, has_room);
    if (by_engine && !caller.engines) door.waited(Clock::now() - began);
}

void Driver::drain(Caller& caller, int device) {
    if (!hostility.drain || poison != cuda::kSuccess) return;
    scheduler.wait_for_queue(caller.lock, device, [](const Scheduler::Queue& queue) {
        return queue.training + queue.engine == 0;
    });
}

cuda::Result Driver::register_host(Caller& caller, const Addresses& pinned, bool portable) {
    const auto began = Clock::now();
    const std::uint64_t pages = pages_not_faulted_in(pinned);
    pinning.pages_faulted_in += pages;
    if (prefers_a_node()) ++pinning.near;
    if (began - pinning.last < pinning.took) ++pinning.hasty;
    const std::uint64_t all = (pinned.end - pinned.begin) / 4096;
    if (const auto takes = hostility.pin_page * pages + hostility.pin_page * all / 10;
        takes.count() > 0) {
        caller.lock.unlock();
        std::this_thread::sleep_for(takes);
        caller.lock.lock();
    }
    const cuda::Result result = memory.register_host(pinned, caller.device, portable);
    pinning.last = Clock::now();
    pinning.took = pinning.last - began;
    return result;
}

void Driver::reset() {
    std::unique_lock lock(mutex_);
    scheduler.stop(lock);
    scheduler.set({});
    streams.reset();
    memory = {};
    counts = {};
    pinning = {};
    held_interpreter = 0;
    door.forget();
    be_hostile("all", hostile_by_environment() ? 1 : 0);
    hidden.clear();
    failures_.clear();
    for (auto& [symbol, count] : calls_) count = 0;
    devices = kDevices;
    version = kVersion;
    attributes = usual_attributes();
    initialized = false;
    poison = cuda::kSuccess;
    ++epoch_;
}

cuda::Result Driver::synchronize_all(Clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    return scheduler.wait_all_until(lock, deadline) ? poison : cuda::kNotReady;
}

void Driver::end() {
    if (!is_of_this_process()) return;
    std::unique_lock lock(mutex_);
    poison = cuda::kDeinitialized;
    scheduler.stop(lock);
}

cuda::Result Driver::check_copy(int device, const DeviceCopy& copy,
                                std::shared_ptr<Registration>& pinned) const {
    const auto to = addresses_of(copy.bytes.to, copy.bytes.nbytes);
    const auto from = addresses_of(copy.bytes.from, copy.bytes.nbytes);
    if (!memory.is_of_device(device, copy.to_host ? from : to)) return cuda::kInvalidValue;
    return memory.find_pinned(device, copy.to_host ? to : from, pinned);
}

cuda::Result Driver::enqueue_copy(Caller& caller, Handle handle, const DeviceCopy& copy) {
    await_room(caller, caller.device, 1);
    Stream* const stream = streams.stream(caller.device, handle);
    if (stream == nullptr) return cuda::kInvalidHandle;
    if (stream->device != caller.device) return cuda::kInvalidContext;
    std::shared_ptr<Registration> pinned;
    if (const cuda::Result refused = check_copy(caller.device, copy, pinned)) {
        ++counts.violations;
        return refused;
    }
    auto work = std::make_shared<Work>();
    work->engines = caller.engines;
    work->direction = copy.to_host ? 0 : 1;
    work->copies.push_back(copy.bytes);
    if (pinned) {
        work->when_finished = [pinned] { --pinned->uses; };
    }
    if (const cuda::Result refused = streams.enqueue(*stream, work)) return refused;
    if (work->number == 0) return cuda::kSuccess;  // captured
    if (pinned) ++pinned->uses;
    (copy.to_host ? counts.bytes_to_host : counts.bytes_to_device) += copy.bytes.nbytes;
    ++counts.copies;
    if (pinned) return cuda::kSuccess;
    // As with a real one: memory that may be paged out is copied while the caller waits.
    ++counts.pageable_copies;
    const bool done =
        scheduler.wait_until(caller.lock, work, Clock::now() + std::chrono::hours(24));
    return done ? poison : cuda::kDeinitialized;
}

}  // namespace datastates::fake_cuda
