// The fake driver's state, and what every call of it begins with.

#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "device/cuda_abi.h"
#include "hostility.h"
#include "memory.h"
#include "scheduler.h"
#include "streams.h"

namespace datastates::fake_cuda {

/// What must have happened before a call of the driver.
enum class Needs : std::uint8_t { kNothing, kInitialized, kContext };

/// A thread that is in a call.
struct Caller {
    Door::Passage passage;  ///< outlives `lock`
    std::unique_lock<std::mutex> lock;
    bool engines = true;  ///< not the training process's
    int device = -1;      ///< of its context
};

/// A thread, as far as the driver remembers it.
struct ThreadState {
    std::uint64_t epoch = 0;       ///< else it is forgotten
    std::vector<Handle> contexts;  ///< innermost last
    cuda::CaptureMode capture_mode = cuda::kCaptureGlobal;
};

struct DeviceCopy {
    bool to_host = false;
    Piecewise bytes;
};

struct Counts {
    std::uint64_t bytes_to_host = 0;
    std::uint64_t bytes_to_device = 0;
    std::uint64_t copies = 0;
    std::uint64_t pageable_copies = 0;
    std::uint64_t violations = 0;
    std::uint64_t early_unregistrations = 0;
};

class Driver {
  public:
    /// Never destroyed: calls may come as late as the process has threads.
    static Driver& instance();

    /// What the driver's function `symbol` does: `body`, if there is nothing against it. It has the
    /// mutex.
    template <typename Body>
    cuda::Result call(const char* symbol, Needs needs, const Body& body) {
        if (!is_of_this_process()) return cuda::kNotInitialized;  // a fork, with no threads
        if (const auto held = interpreter_held_.load(); held != nullptr && held() != 0) {
            ++held_interpreter;
        }
        Caller caller{.passage = door.enter(true), .lock = std::unique_lock(mutex_)};
        if (const cuda::Result refused = admit(symbol, needs, caller)) return refused;
        return body(*this, caller);
    }

    /// Likewise what a function for tests does, on a device that the training process uses.
    template <typename Body>
    cuda::Result train(int device, const Body& body) {
        if (!is_of_this_process()) return cuda::kNotInitialized;
        Caller caller{.passage = door.enter(false),
                      .lock = std::unique_lock(mutex_),
                      .engines = false,
                      .device = device};
        if (device < 0 || device >= devices) return cuda::kInvalidDevice;
        if (poison != cuda::kSuccess) return poison;
        initialized = true;
        streams.keep(device);
        return body(*this, caller);
    }

    /// Likewise what arranges or reads.
    template <typename Body>
    auto arrange(const Body& body) {
        const std::scoped_lock lock(mutex_);
        return body(*this);
    }

    void reset();

    cuda::Result synchronize_all(Clock::time_point deadline);

    /// False if there is no such way.
    bool be_hostile(std::string_view way, std::uint64_t value);

    /// As at the end of a process: no threads, and no call succeeds.
    void end();

    [[nodiscard]] bool is_known(std::string_view symbol) const { return calls_.contains(symbol); }
    [[nodiscard]] std::uint64_t calls_of(std::string_view symbol) const {
        return calls_.find(symbol)->second;
    }
    void fail_next(std::string_view symbol, cuda::Result code, int skip);
    void watch_interpreter(int (*held)()) { interpreter_held_ = held; }

    [[nodiscard]] ThreadState& this_thread() const;
    /// Before a call gives a device so many commands: waits for room in its queue.
    void await_room(Caller& caller, int device, std::uint64_t commands);
    /// As calls do that drain the device.
    void drain(Caller& caller, int device);
    cuda::Result register_host(Caller& caller, const Addresses& pinned, bool portable);
    cuda::Result enqueue_copy(Caller& caller, Handle handle, const DeviceCopy& copy);

    Door door;
    std::atomic<std::uint64_t> held_interpreter = 0;

    // With the mutex.
    Hostility hostility;
    Pinning pinning;
    int devices = kDevices;
    int version = kVersion;
    std::map<int, int> attributes = usual_attributes();
    bool initialized = false;
    cuda::Result poison = cuda::kSuccess;
    std::set<std::string, std::less<>> hidden;
    Counts counts;
    Memory memory;
    Scheduler scheduler{mutex_};
    Streams streams{scheduler};

  private:
    static constexpr int kDevices = 2;
    static constexpr int kVersion = 13000;
    static std::map<int, int> usual_attributes();

    struct Failure {
        cuda::Result code = cuda::kSuccess;
        int skip = 0;
    };

    Driver();
    [[nodiscard]] bool is_of_this_process() const;
    cuda::Result admit(const char* symbol, Needs needs, Caller& caller);
    cuda::Result check_copy(int device, const DeviceCopy& copy,
                            std::shared_ptr<Registration>& pinned) const;

    std::mutex mutex_;  // guards all; taken after the door's
    std::atomic<int (*)()> interpreter_held_ = nullptr;
    const pid_t process_;
    std::uint64_t epoch_ = 1;  // of handles, contexts and threads: a reset begins another
    std::map<std::string, std::uint64_t, std::less<>> calls_;
    std::map<std::string, std::vector<Failure>, std::less<>> failures_;  // by symbol
};

}  // namespace datastates::fake_cuda
