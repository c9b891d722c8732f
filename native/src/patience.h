// How long those who wait for a device go on when the engine is being shut down: it may hang.

#pragma once

#include <atomic>

#include "window.h"

namespace datastates {

class Patience {
  public:
    static constexpr std::chrono::seconds kDefault{10};

    explicit Patience(Clock::duration length) : length_(length) {}

    /// The shutdown begins. Only the first call counts.
    void begin() {
        auto never = Clock::time_point::max();
        ends_at_.compare_exchange_strong(never, Clock::now() + length_);
    }

    [[nodiscard]] bool is_over() const { return Clock::now() >= ends_at_.load(); }

  private:
    const Clock::duration length_;
    std::atomic<Clock::time_point> ends_at_ = Clock::time_point::max();
};

}  // namespace datastates
