// The threads of a pipeline, and how they end: joined, or left in a system call that does not
// return.

#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/immovable.h"
#include "base/threads.h"

namespace datastates {

class Crew : public Immovable {
  public:
    /// Starts a thread. `body` keeps alive what it uses, this crew too.
    void start(const std::string& name, std::function<void()> body) {
        const std::scoped_lock lock(mutex_);
        std::jthread& thread = threads_.emplace_back();
        try {
            thread = start_thread(name, [this, run = std::move(body)] {
                run();
                const std::scoped_lock ended(mutex_);
                --running_;
                ended_.notify_all();
            });
        } catch (...) {
            threads_.pop_back();
            throw;
        }
        ++running_;
    }

    /// How many were started.
    [[nodiscard]] std::size_t size() const {
        const std::scoped_lock lock(mutex_);
        return threads_.size();
    }

    /// Joins them when all have ended; false if some have not by `deadline`. Those are detached,
    /// which no other thread ever is: they may sit in the system until the process has ended. One
    /// that returns works on with what it keeps alive: the pipeline, its jobs, their segments.
    bool join(Clock::time_point deadline) {
        std::unique_lock lock(mutex_);
        const bool all = ended_.wait_until(lock, deadline, [&] { return running_ == 0; });
        std::list<std::jthread> threads(std::move(threads_));
        threads_.clear();
        lock.unlock();
        for (std::jthread& thread : threads) {
            if (all) {
                thread.join();
            } else {
                thread.detach();
            }
        }
        return all;
    }

  private:
    mutable std::mutex mutex_;       // guards what follows
    std::condition_variable ended_;  // running_
    std::list<std::jthread> threads_;
    std::size_t running_ = 0;
};

}  // namespace datastates
