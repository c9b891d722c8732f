#include "device/device_lane.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "base/sizes.h"
#include "base/threads.h"

namespace datastates {
namespace {

std::uint64_t bytes_of(std::span<const DeviceCopy> copies) {
    std::uint64_t nbytes = 0;
    for (const DeviceCopy& copy : copies) nbytes += copy.nbytes;
    return nbytes;
}

}  // namespace

DeviceLane::DeviceLane(std::shared_ptr<Device> device, Direction direction,
                       const Patience& patience, std::uint64_t bytes_per_second)
    : device_(std::move(device)),
      direction_(direction),
      streams_(device_->streams(direction)),
      name_((direction == Direction::kGather ? "ds-from-" : "ds-to-") +
            std::to_string(device_->number())),
      patience_(patience),
      pace_(bytes_per_second) {}

void DeviceLane::copy(std::span<const DeviceCopy> copies, JobFences& fences, const Queued& queued,
                      Done done) {
    // Before anything is enqueued: there is no way back from that.
    NodeQueue<Part> parts(std::max<std::size_t>(divide_up(copies.size(), kMostCopies), 1));
    Fences first;  // destroyed without the lock: that calls the driver
    Enqueued all;
    {
        const std::scoped_lock order(order_);
        if (start()) {
            first = fences.take(device_->number());
            Events events;
            all = enqueue(copies, first, parts, events);
            if (!all.done) fences.give_back(first);  // no wait for them may be under way
            try {
                queued(events);
            } catch (const std::bad_alloc&) {
                if (all.status.ok()) all.status = out_of_memory("copy");
            }
        } else {
            all.status = shut_down();
        }
        if (all.done) {
            Part& end = parts.front();
            if (!end.event) end.event = std::move(all.done);
            end.status = std::move(all.status);
            end.done = std::move(done);
            hand_over(parts);
            return;
        }
    }
    done({.status = std::move(all.status), .finished = true});
}

/// Leaves the last part to the caller. With order_ held.
Enqueued DeviceLane::enqueue(std::span<const DeviceCopy> copies, const Fences& fences,
                             NodeQueue<Part>& parts, Events& events) {
    Enqueued all;
    for (const auto& fence : fences) {
        for (const StreamHandle stream : streams_) {
            all.status = device_->hold(stream, *fence);
            if (!all.status.ok()) return all;
        }
    }
    while (true) {
        const auto now = copies.first(std::min(copies.size(), kMostCopies));
        all.status = wait_for_room(bytes_of(now));
        if (!all.status.ok()) return all;
        Enqueued some;
        try {
            some = device_->copy(direction_, now, streams_.at(turn_));
        } catch (const std::bad_alloc&) {
            some.status = out_of_memory("copy");
        }
        if (some.done) {
            all.done = some.done;
            events.at(turn_) = some.done;
            turn_ = (turn_ + 1) % streams_.size();
            Part& part = parts.front();
            part.event = std::move(some.done);
            part.outstanding = true;
            part.since = Clock::now();
            const std::scoped_lock lock(mutex_);
            ++outstanding_;
        }
        copies = copies.subspan(now.size());
        all.status = std::move(some.status);
        if (!all.status.ok() || copies.empty()) return all;
        hand_over(parts);
    }
}

/// Returns when a part of so many bytes may be enqueued. With order_ held.
Status DeviceLane::wait_for_room(std::uint64_t nbytes) {
    std::this_thread::sleep_until(pace_.take(nbytes));  // as long as one part takes, at most
    std::unique_lock lock(mutex_);
    room_.wait(lock, [&] { return outstanding_ < kMostParts; });
    if (hangs_) return shut_down();
    return {};
}

/// Gives the first of `parts` to the thread.
void DeviceLane::hand_over(NodeQueue<Part>& parts) {
    const std::scoped_lock lock(mutex_);
    parts_.push_back(parts.take_front());
    changed_.notify_one();
}

bool DeviceLane::start() {
    const std::scoped_lock lock(mutex_);
    if (stopping_) return false;
    if (!thread_.joinable()) thread_ = start_thread(name_, [this] { loop(); });
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
    Status failed;         // of the call that the parts are of
    bool finished = true;  // of the device, with all parts of the call
    while (true) {
        Part part;
        {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [&] { return stopping_ || !parts_.empty(); });
            if (parts_.empty()) return;
            part = parts_.pop_front();
        }
        auto [status, idle] = part.event->wait_idle([&] { return patience_.is_over(part.since); });
        if (!idle && status.ok()) status = shut_down();
        if (!status.ok() && failed.ok()) failed = std::move(status);
        finished = finished && idle;
        part.event.reset();
        {
            const std::scoped_lock lock(mutex_);
            outstanding_ -= part.outstanding ? 1 : 0;
            hangs_ = hangs_ || !idle;
            room_.notify_one();
        }
        if (!part.done) continue;
        if (!part.status.ok()) failed = std::move(part.status);
        part.done({.status = std::exchange(failed, {}), .finished = std::exchange(finished, true)});
    }
}

}  // namespace datastates
