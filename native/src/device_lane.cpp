#include "device_lane.h"

#include <chrono>
#include <string>
#include <utility>

#include "threads.h"

namespace datastates {
namespace {

/// How long a shutdown waits for a device that may hang.
constexpr std::chrono::seconds kPatience(10);

Fault shut_down() {
    return {.kind = FaultKind::kShutdown, .path = {}, .operation = {}, .detail = {}};
}

}  // namespace

void DeviceLane::read(std::span<const DeviceCopy> copies, const Fences& fences,
                      const Queued& queued, Done done) {
    Reading reading{.event = {}, .fault = {}, .done = std::move(done)};
    {
        const std::scoped_lock order(order_);
        const std::scoped_lock lock(mutex_);
        if (stopping_) {
            reading.fault = shut_down();
        } else {
            if (!thread_.joinable()) {
                thread_ = start_thread("ds-device-" + std::to_string(device_->number()),
                                       [this] { loop(); });
            }
            readings_.emplace_back();  // so that what follows cannot fail for want of memory
            reading.fault = device_->copy(Direction::kGather, copies, device_->save_stream(),
                                          fences, reading.event);
            queued(reading.event);
            if (reading.event) {
                readings_.back() = std::move(reading);
                changed_.notify_one();
                return;
            }
            readings_.pop_back();
        }
    }
    reading.done({.fault = std::move(reading.fault), .finished = true});
}

void DeviceLane::shutdown() {
    std::jthread thread;
    {
        const std::scoped_lock lock(mutex_);
        if (!stopping_) gives_up_at_ = Clock::now() + kPatience;
        stopping_ = true;
        thread.swap(thread_);
        changed_.notify_all();
    }
}

bool DeviceLane::gives_up() {
    const std::scoped_lock lock(mutex_);
    return Clock::now() >= gives_up_at_;
}

void DeviceLane::loop() {
    while (true) {
        Reading reading;
        {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [&] { return stopping_ || !readings_.empty(); });
            if (readings_.empty()) return;
            reading = std::move(readings_.front());
            readings_.pop_front();
        }
        bool finished = false;
        auto fault = reading.event->wait([this] { return gives_up(); }, finished);
        // A driver that reports a fault runs nothing any more.
        if (fault) finished = true;
        if (reading.fault) fault = std::move(reading.fault);
        if (!finished && !fault) fault = shut_down();
        reading.event.reset();
        reading.done({.fault = std::move(fault), .finished = finished});
    }
}

}  // namespace datastates
