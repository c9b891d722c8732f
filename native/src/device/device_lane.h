// Copies from one device, in the order of one stream, and the thread that sees when they are done.

#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <thread>

#include "device/device.h"
#include "pipeline/patience.h"

namespace datastates {

class DeviceLane {
  public:
    /// How a read ended. Not `finished`: the device still may write where it was told to.
    struct Outcome {
        MaybeFault fault;
        bool finished = true;
    };
    using Queued = std::function<void(const std::shared_ptr<DeviceEvent>&)>;
    using Done = std::function<void(Outcome)>;

    /// Waits for what is under way, as long as `patience` lasts.
    DeviceLane(std::shared_ptr<Device> device, const Patience& patience)
        : device_(std::move(device)), patience_(patience) {}
    DeviceLane(const DeviceLane&) = delete;
    DeviceLane& operator=(const DeviceLane&) = delete;
    DeviceLane(DeviceLane&&) = delete;
    DeviceLane& operator=(DeviceLane&&) = delete;
    ~DeviceLane() { shutdown(); }

    [[nodiscard]] const std::shared_ptr<Device>& device() const { return device_; }

    /// Enqueues `copies` after `fences`. `queued` is told the event after them (null after a fault
    /// that left none), in the calling thread, in the order of the stream; `done` is called once,
    /// in the lane's thread or, if nothing could be enqueued, in this one. Throws std::bad_alloc or
    /// std::system_error, and then has enqueued nothing and calls neither.
    void read(std::span<const DeviceCopy> copies, const Fences& fences, const Queued& queued,
              Done done);

    /// Waits for what is under way, until patience is over: a device may hang. Joins the thread.
    void shutdown();

  private:
    struct Reading {
        std::shared_ptr<DeviceEvent> event;
        MaybeFault fault;
        Done done;
        Clock::time_point since = Clock::now();  ///< what hangs is waited for from here on
    };

    bool start();  // false when stopping
    void loop();

    const std::shared_ptr<Device> device_;
    const Patience& patience_;
    std::mutex order_;  // held while a read is enqueued and told of: `queued` comes in stream order

    std::mutex mutex_;                 // guards what follows; taken after order_
    std::condition_variable changed_;  // readings_, stopping_
    std::list<Reading> readings_;      // a list, to which a node is added without fail
    bool stopping_ = false;            // set with order_ held, too
    std::jthread thread_;  // ends when stopping_ and nothing is left; joined by `shutdown`
};

}  // namespace datastates
