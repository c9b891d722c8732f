#include "device/device_lane.h"

#include <new>
#include <string>
#include <utility>

#include "base/threads.h"

namespace datastates {

void DeviceLane::read(std::span<const DeviceCopy> copies, const Fences& fences,
                      const Queued& queued, Done done) {
    std::list<Reading> made;  // before anything is enqueued: there is no way back from that
    Reading& reading = made.emplace_back();
    {
        const std::scoped_lock order(order_);
        if (start()) {
            reading.fault = device_->copy(Direction::kGather, copies, device_->save_stream(),
                                          fences, reading.event);
            try {
                queued(reading.event);
            } catch (const std::bad_alloc&) {
                if (!reading.fault) reading.fault = out_of_memory("copy");
            }
        } else {
            reading.fault = shut_down();
        }
        reading.done = std::move(done);
        if (reading.event) {
            const std::scoped_lock lock(mutex_);
            readings_.splice(readings_.end(), made);
            changed_.notify_one();
            return;
        }
    }
    reading.done({.fault = std::move(reading.fault), .finished = true});
}

bool DeviceLane::start() {
    const std::scoped_lock lock(mutex_);
    if (stopping_) return false;
    if (!thread_.joinable()) {
        thread_ =
            start_thread("ds-device-" + std::to_string(device_->number()), [this] { loop(); });
    }
    return true;
}

void DeviceLane::shutdown() {
    std::jthread thread;
    const std::scoped_lock both(order_, mutex_);
    stopping_ = true;
    thread.swap(thread_);
    changed_.notify_all();
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
        auto fault =
            reading.event->wait_idle([&] { return patience_.is_over(reading.since); }, finished);
        if (reading.fault) fault = std::move(reading.fault);
        if (!finished && !fault) fault = shut_down();
        reading.event.reset();
        reading.done({.fault = std::move(fault), .finished = finished});
    }
}

}  // namespace datastates
