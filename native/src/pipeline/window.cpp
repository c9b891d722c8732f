#include "pipeline/window.h"

#include <utility>

namespace datastates {

void Window::open() {
    const auto now = Clock::now();
    auto before = opened_at_.load(std::memory_order_acquire);
    while (now < before && !opened_at_.compare_exchange_weak(before, now)) {
    }
    // Called without the lock: the listener takes its own, and attaches under none of them.
    std::vector<std::weak_ptr<WindowListener>> listeners;
    {
        const std::scoped_lock lock(mutex_);
        listeners.swap(listeners_);
    }
    for (const auto& weak : listeners) {
        if (const auto listener = weak.lock()) listener->window_opened();
    }
}

void Window::attach(std::weak_ptr<WindowListener> listener) {
    const std::scoped_lock lock(mutex_);
    listeners_.push_back(std::move(listener));
}

}  // namespace datastates
