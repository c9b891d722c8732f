// In which ways the fake driver is as bad as a real one.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string_view>

#include "memory.h"
#include "scheduler.h"

namespace datastates::fake_cuda {

/// What fake_cuda_be_hostile sets. Guarded by the driver's mutex.
struct Hostility {
    std::uint64_t queue = 0;  ///< commands of a device; 0: no bound
    bool drain = false;
    std::chrono::nanoseconds pin_page{0};
    std::chrono::microseconds lie{0};
    bool context = false;
    bool engines = false;
};

/// The lock that a real driver holds through its calls. While it is open, calls pass side by side.
class Door {
  public:
    /// A call on its way through; it may move to where the call ends.
    class Passage {
      public:
        Passage() = default;
        explicit Passage(Door& door) : door_(&door), lock_(door.mutex_, std::defer_lock) {}
        Passage(const Passage&) = delete;
        Passage& operator=(const Passage&) = delete;
        Passage(Passage&&) = default;
        Passage& operator=(Passage&&) = default;
        ~Passage() {
            if (lock_.owns_lock()) door_->engine_inside_ = false;
        }

        /// Whether those who wait outside wait for the engine from now on.
        void blame_engine(bool blame) {
            if (lock_.owns_lock()) door_->engine_inside_ = blame;
        }

      private:
        friend class Door;
        Door* door_ = nullptr;
        std::unique_lock<std::mutex> lock_;
    };

    Passage enter(bool engine);
    void close(bool on) { closed_ = on; }
    /// A call of the training process has waited so long behind one of the engine's.
    void waited(Clock::duration time);
    [[nodiscard]] Clock::duration longest_wait() const { return longest_.load(); }
    void forget() { longest_ = Clock::duration::zero(); }

  private:
    std::mutex mutex_;  // held through a call, while the door is closed
    std::atomic<bool> closed_ = false;
    std::atomic<bool> engine_inside_ = false;
    std::atomic<Clock::duration> longest_ = Clock::duration::zero();
};

/// What pinning has cost. Guarded by the driver's mutex.
struct Pinning {
    std::uint64_t pages_faulted_in = 0;
    std::uint64_t hasty = 0;  ///< sooner after the one before than that had taken
    Clock::duration took{0};  ///< the last one
    Clock::time_point last;   ///< when it ended
    std::uint64_t near = 0;   ///< by threads that prefer memory of one node
};

/// Pages of 4 KiB that are not faulted in.
std::uint64_t pages_not_faulted_in(const Addresses& memory);

/// Whether the calling thread prefers memory of one NUMA node.
bool prefers_a_node();

/// Whether drivers are hostile from the beginning.
bool hostile_by_environment();

}  // namespace datastates::fake_cuda
