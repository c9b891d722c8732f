// How fast a resource that is shared with others may be used.

#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>

#include "base/clock.h"
#include "base/immovable.h"

namespace datastates {

class Pace : public Immovable {
  public:
    /// 0: no limit.
    explicit Pace(std::uint64_t bytes_per_second)
        : bytes_per_second_(static_cast<double>(bytes_per_second)) {}

    /// When the caller may use it for `nbytes`: those that ask later may afterwards. Any thread.
    [[nodiscard]] Clock::time_point take(std::uint64_t nbytes) {
        if (bytes_per_second_ == 0) return Clock::time_point::min();
        const std::chrono::duration<double> takes(static_cast<double>(nbytes) / bytes_per_second_);
        const std::scoped_lock lock(mutex_);
        const auto begin = std::max(next_, Clock::now());
        next_ = begin + std::chrono::duration_cast<Clock::duration>(takes);
        return begin;
    }

  private:
    const double bytes_per_second_;
    std::mutex mutex_;  // guards next_
    Clock::time_point next_;
};

}  // namespace datastates
