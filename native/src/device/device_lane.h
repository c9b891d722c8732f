// Copies from or to one device, on two streams in turn, and the thread that sees when they are
// done.

#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <tuple>

#include "base/immovable.h"
#include "base/node_queue.h"
#include "base/pace.h"
#include "base/patience.h"
#include "device/device.h"

namespace datastates {

class DeviceLane : public Immovable {
  public:
    /// Copies that are enqueued together: a part. More would fill the device's launch queue, in
    /// which training's own launches then wait.
    static constexpr std::size_t kMostCopies = 64;
    /// Parts that were enqueued and are not known to be done. A device makes copies of one
    /// direction one after the other, and turns to another stream when it has none left of this
    /// one: beside a stream that never runs dry, `loss.item()` waits for the whole save (seen on
    /// an H100). So each stream has one part, and the device has the other's to go on with.
    static constexpr std::size_t kMostParts = std::tuple_size_v<CopyStreams>;

    /// An event of each stream, or null.
    using Events = std::array<std::shared_ptr<DeviceEvent>, kMostParts>;
    using Queued = std::function<void(const Events&)>;
    using Done = std::function<void(CopyOutcome)>;

    /// Copies on the device's streams for `direction`, at most `bytes_per_second` (0: no limit).
    /// Waits for what is under way, as long as `patience` lasts.
    DeviceLane(std::shared_ptr<Device> device, Direction direction, const Patience& patience,
               std::uint64_t bytes_per_second = 0);
    ~DeviceLane() { shutdown(); }

    [[nodiscard]] const std::shared_ptr<Device>& device() const { return device_; }

    /// Enqueues `copies`, of one segment, after the job's `fences`; waits while too many are
    /// outstanding. `queued` is told the events after them (null where a stream got none), in the
    /// calling thread, in the order of the streams; `done` is called once, in the lane's
    /// thread or, if nothing could be enqueued, in this one. Throws std::bad_alloc or
    /// std::system_error, and then has enqueued nothing and calls neither.
    void copy(std::span<const DeviceCopy> copies, JobFences& fences, const Queued& queued,
              Done done);

    /// Waits for what is under way, until patience is over: a device may hang. Joins the thread.
    void shutdown();

  private:
    /// Some of the copies of a call; its last one has the rest.
    struct Part {
        std::shared_ptr<DeviceEvent> event;
        bool outstanding = false;                ///< else the event is the part's before
        Status status;                           ///< of the call, in its last part
        Done done;                               ///< null if it is not the last
        Clock::time_point since = Clock::now();  ///< what hangs is waited for from here on
    };

    bool start();  // false when stopping
    Enqueued enqueue(std::span<const DeviceCopy> copies, const Fences& fences,
                     NodeQueue<Part>& parts, Events& events);
    Status wait_for_room(std::uint64_t nbytes);
    void hand_over(NodeQueue<Part>& parts);
    void loop();

    const std::shared_ptr<Device> device_;
    const Direction direction_;
    const CopyStreams& streams_;
    const std::string name_;
    const Patience& patience_;
    Pace pace_;
    std::mutex order_;      // held while a call is enqueued and told of; guards what follows
    std::size_t turn_ = 0;  // the stream of the next part

    std::mutex mutex_;                 // guards what follows; taken after order_
    std::condition_variable changed_;  // parts_, stopping_
    std::condition_variable room_;     // outstanding_
    NodeQueue<Part> parts_;
    std::size_t outstanding_ = 0;  // parts
    bool hangs_ = false;           // patience was over before a part was done
    bool stopping_ = false;        // set with order_ held, too
    std::jthread thread_;          // ends when stopping_ and nothing is left; joined by `shutdown`
};

}  // namespace datastates
