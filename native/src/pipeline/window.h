// The read window of a save: until it opens, the save's sources are not read.

#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "base/immovable.h"

namespace datastates {

/// Wants to know that a window was opened by hand.
class WindowListener : public Immovable {
  public:
    virtual ~WindowListener() = default;

    virtual void window_opened() = 0;
};

class Window {
  public:
    /// Opens by itself at `deadline`; a thread that waits for it keeps an eye on the clock.
    explicit Window(Clock::time_point deadline) : deadline_(deadline) {}

    /// Opens it now, if it is not open. Any thread; does not block.
    void open();

    [[nodiscard]] bool is_open() const { return opened_at() <= Clock::now(); }

    /// When it opened, or the latest time at which it will.
    [[nodiscard]] Clock::time_point opened_at() const {
        return opened_at_.load(std::memory_order_acquire);
    }

    /// Has `listener` called at `open`, as long as it lives. (Look at `is_open` afterwards.)
    void attach(std::weak_ptr<WindowListener> listener);

  private:
    Clock::time_point deadline_;
    std::atomic<Clock::time_point> opened_at_{deadline_};
    std::mutex mutex_;                                      // guards listeners_
    std::vector<std::weak_ptr<WindowListener>> listeners_;  // one per job: few
};

}  // namespace datastates
