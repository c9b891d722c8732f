// Runs work when what it must follow is done, and else in any order: with threads of its own, late,
// and piece by piece.

#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace datastates::fake_cuda {

using Clock = std::chrono::steady_clock;

struct Piecewise {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    std::uint64_t nbytes = 0;
};

/// Something a stream does; nothing, for an event.
struct Work {
    std::function<void()> kernel;         ///< called first, if there is one
    std::vector<Piecewise> copies;        ///< made in any order
    std::vector<std::byte> written;       ///< what a copy may read from
    std::function<void()> when_finished;  ///< called with the mutex held, also if it was dropped
    int device = 0;
    std::uintptr_t stream = 0;
    int direction = -1;    ///< of copies by a copy engine: 0 to the host, 1 to the device
    bool engines = false;  ///< of the engine, not of the training process

    // The scheduler's.
    std::uint64_t number = 0;
    std::size_t blockers = 0;  ///< what it must follow and is not done
    std::vector<std::shared_ptr<Work>> followers;
    bool done = false;
    Clock::time_point done_at;

    /// In the queue of its device.
    [[nodiscard]] std::uint64_t commands() const {
        return std::max<std::uint64_t>(copies.size(), 1);
    }
    [[nodiscard]] std::uint64_t nbytes() const {
        std::uint64_t all = 0;
        for (const Piecewise& each : copies) all += each.nbytes;
        return all;
    }
};
using WorkPointer = std::shared_ptr<Work>;

/// Every function is called with the mutex held.
class Scheduler {
  public:
    explicit Scheduler(std::mutex& mutex) : mutex_(mutex) {}

    struct Manners {
        std::uint64_t seed = 0;
        std::chrono::microseconds max_delay{200};
        std::uint64_t piece_nbytes = 65536;
        bool show_accesses = false;  ///< to ThreadSanitizer
    };
    void set(const Manners& manners);
    [[nodiscard]] const Manners& manners() const { return manners_; }

    /// Runs `work` some time after all that is in `leaders` (null: none) is done.
    void submit(const WorkPointer& work, std::span<const WorkPointer> leaders);

    /// False if it is not done by then, or never will be. Lets go of the mutex while it waits.
    bool wait_until(std::unique_lock<std::mutex>& lock, const WorkPointer& work,
                    Clock::time_point deadline);
    bool wait_all_until(std::unique_lock<std::mutex>& lock, Clock::time_point deadline);

    void stall(bool on);

    /// Whether a device has one copy engine for each direction, or any number.
    void use_engines(bool on) {
        use_engines_ = on;
        may_run_.notify_all();
    }

    /// Nothing submitted so far has any effect from now on, but for what has begun.
    void drop_all();

    /// Ends the threads, after the pieces at hand, and forgets all work. Lets go of the mutex.
    void stop(std::unique_lock<std::mutex>& lock);

    [[nodiscard]] std::size_t pending() const { return pending_.size(); }

    /// Commands of a device that are not done.
    struct Queue {
        std::uint64_t training = 0;
        std::uint64_t engine = 0;
        std::uint64_t most_of_engine = 0;
        std::uint64_t engine_bytes = 0;  ///< of copies
        std::uint64_t most_engine_bytes = 0;
    };
    [[nodiscard]] Queue& queue(int device) { return queues_[device]; }

    /// Waits until `so` is true of the queue, or never will be. Lets go of the mutex while it
    /// waits.
    void wait_for_queue(std::unique_lock<std::mutex>& lock, int device,
                        const std::function<bool(const Queue&)>& so);

  private:
    void start();
    /// Makes copies one after the other; first those of the stream whose turn it is.
    struct CopyEngine {
        bool busy = false;
        std::uintptr_t stream = 0;
    };

    void run();
    WorkPointer take_any();
    CopyEngine* copy_engine(const Work& work);
    [[nodiscard]] bool may_turn(const CopyEngine& engine, const Work& work) const;
    void perform(std::unique_lock<std::mutex>& lock, Work& work);
    void copy(std::unique_lock<std::mutex>& lock, const Work& work, const Piecewise& copy);
    void finish(Work& work);
    void pause(std::unique_lock<std::mutex>& lock, std::uint64_t one_in);
    [[nodiscard]] bool is_dropped(const Work& work) const {
        return stopping_ || work.number <= dropped_up_to_;
    }
    std::uint64_t below(std::uint64_t bound);

    std::mutex& mutex_;  // the driver's; guards all of this
    Manners manners_;
    std::mt19937_64 random_;
    std::map<std::uint64_t, WorkPointer> pending_;  // not done, by number
    std::vector<WorkPointer> ready_;                // of those, what may be begun
    std::map<int, Queue> queues_;                   // by device
    std::uint64_t submitted_ = 0;
    std::uint64_t dropped_up_to_ = 0;  // by number
    std::uint64_t stops_ = 0;
    std::map<std::pair<int, int>, CopyEngine> engines_;  // by device and direction
    bool use_engines_ = false;
    bool stalled_ = false;
    bool stopping_ = false;
    std::condition_variable may_run_;   // of threads: there is something to run, or to end
    std::condition_variable finished_;  // of callers: something is done, or never will be
    std::vector<std::jthread> threads_;
};

}  // namespace datastates::fake_cuda
