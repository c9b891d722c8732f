// Copies from or to one device, in the order of one stream, and the thread that sees when they are
// done.

#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>

#include "base/immovable.h"
#include "base/node_queue.h"
#include "base/pace.h"
#include "base/patience.h"
#include "device/device.h"

namespace datastates {

class DeviceLane : public Immovable {
  public:
    /// Copies that were enqueued and are not known to be done. More would fill the device's launch
    /// queue, in which training's own launches then wait.
    static constexpr std::size_t kMostOutstanding = 128;
    /// Likewise their bytes, but for one larger copy. A device makes copies of one direction one
    /// after the other, and may finish those of a stream first: a copy of training's waits for
    /// them.
    static constexpr std::uint64_t kMostOutstandingBytes = std::uint64_t{32} << 20U;

    using Queued = std::function<void(const std::shared_ptr<DeviceEvent>&)>;
    using Done = std::function<void(CopyOutcome)>;

    /// Copies on the device's stream for `direction`, at most `bytes_per_second` (0: no limit).
    /// Waits for what is under way, as long as `patience` lasts.
    DeviceLane(std::shared_ptr<Device> device, Direction direction, const Patience& patience,
               std::uint64_t bytes_per_second = 0);
    ~DeviceLane() { shutdown(); }

    [[nodiscard]] const std::shared_ptr<Device>& device() const { return device_; }

    /// Enqueues `copies` after the job's `fences`; waits while too many are outstanding. `queued`
    /// is told the event after them (null after a fault that left none), in the calling thread, in
    /// the order of the stream; `done` is called once, in the lane's thread or, if nothing could be
    /// enqueued, in this one. Throws std::bad_alloc or std::system_error, and then has enqueued
    /// nothing and calls neither.
    void copy(std::span<const DeviceCopy> copies, JobFences& fences, const Queued& queued,
              Done done);

    /// Waits for what is under way, until patience is over: a device may hang. Joins the thread.
    void shutdown();

  private:
    /// Some of the copies of a call; its last one has the rest.
    struct Part {
        std::shared_ptr<DeviceEvent> event;
        std::size_t copies = 0;
        std::uint64_t nbytes = 0;
        Status status;                           ///< of the call, in its last part
        Done done;                               ///< null if it is not the last
        Clock::time_point since = Clock::now();  ///< what hangs is waited for from here on
    };

    bool start();  // false when stopping
    Enqueued enqueue(std::span<const DeviceCopy> copies, const Fences& fences,
                     NodeQueue<Part>& parts);
    Status wait_for_room(std::size_t copies, std::uint64_t nbytes);
    void hand_over(NodeQueue<Part>& parts);
    void loop();

    const std::shared_ptr<Device> device_;
    const Direction direction_;
    const StreamHandle stream_;
    const std::string name_;
    const Patience& patience_;
    Pace pace_;
    std::mutex order_;  // held while a call is enqueued and told of: `queued` comes in stream order

    std::mutex mutex_;                 // guards what follows; taken after order_
    std::condition_variable changed_;  // parts_, stopping_
    std::condition_variable room_;     // outstanding_
    NodeQueue<Part> parts_;
    std::size_t outstanding_ = 0;  // copies
    std::uint64_t outstanding_bytes_ = 0;
    bool hangs_ = false;     // patience was over before what was waited for last was done
    bool stopping_ = false;  // set with order_ held, too
    std::jthread thread_;    // ends when stopping_ and nothing is left; joined by `shutdown`
};

}  // namespace datastates
