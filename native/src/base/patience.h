// How long those who wait for a device go on when the process, or the engine, is about to end: it
// may hang.

#pragma once

#include <algorithm>
#include <atomic>

#include "base/clock.h"

namespace datastates {

class Patience {
  public:
    static constexpr std::chrono::seconds kDefault{10};

    explicit Patience(Clock::duration length) : length_(length) {}

    /// The shutdown begins: all waits end in time. Only the first call counts.
    void begin() { set(ends_at_, length_); }

    /// The process is about to end, and there is work yet to be done: from now on each wait ends in
    /// time, and others may follow. Only the first call counts.
    void limit() { set(limited_at_, Clock::duration::zero()); }

    /// For who waits since then.
    [[nodiscard]] bool is_over(Clock::time_point since) const {
        const auto now = Clock::now();
        const auto limited_at = limited_at_.load();
        return now >= ends_at_.load() ||
               (now >= limited_at && now - std::max(since, limited_at) >= length_);
    }

  private:
    static void set(std::atomic<Clock::time_point>& moment, Clock::duration from_now) {
        auto never = Clock::time_point::max();
        moment.compare_exchange_strong(never, Clock::now() + from_now);
    }

    const Clock::duration length_;
    std::atomic<Clock::time_point> ends_at_ = Clock::time_point::max();
    std::atomic<Clock::time_point> limited_at_ = Clock::time_point::max();
};

}  // namespace datastates
