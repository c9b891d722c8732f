// One device as the engine uses it: its context, its streams, its events.

#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/immovable.h"
#include "base/status.h"
#include "device/device_api.h"
#include "memory/host_cache.h"

namespace datastates {

class DeviceEvent;

/// What became of copies that a device was to be given.
struct Enqueued {
    Status status;
    std::shared_ptr<DeviceEvent> done;  ///< comes after all that may be under way; null: nothing is
};

/// How copies ended. Not `finished`: the device may still use the memory.
struct CopyOutcome {
    Status status;
    bool finished = true;
};

/// The streams on which the copies of one direction take turns.
using CopyStreams = std::array<StreamHandle, 2>;

/// Events that copies come after.
using Fences = std::vector<std::shared_ptr<DeviceEvent>>;

/// The fences of one job. A stream waits for them once: what it is given later comes after them
/// too. Any thread.
class JobFences {
  public:
    explicit JobFences(Fences fences) : fences_(std::move(fences)) {}

    /// Those of `device` in the first call, none later.
    Fences take(int device);
    /// What was taken, and no stream waits for. Cannot fail.
    void give_back(Fences& fences);
    Fences take_all();

  private:
    std::mutex mutex_;  // guards what follows
    Fences fences_;
};

/// Binds the calling thread to a device's context, as long as it lives. Its calls break no graph
/// that is being captured, by whichever thread. (Queries of events do, for one; and so does
/// whatever may allocate.)
class DeviceScope : public Immovable {
  public:
    DeviceScope(DeviceApi& api, int device);
    ~DeviceScope();

    /// Whether the thread is bound, or why it is not.
    [[nodiscard]] const Status& status() const { return status_; }

  private:
    DeviceApi& api_;
    CaptureMode mode_ = kRelaxedCapture;  // then the thread's own, to restore
    Status status_;
};

/// Host memory is pinned in pieces that end at multiples of this, and no copy crosses one: drivers
/// refuse copies of memory that is pinned in part, or in two calls. The driver's lock, and with it
/// each launch of a kernel, waits while a piece is pinned.
inline constexpr std::uint64_t kPinBytes = std::uint64_t{16} << 20U;

/// Any thread may call anything; nothing waits for the device.
class Device : public std::enable_shared_from_this<Device>, public Immovable {
  public:
    /// Takes a reference to the context of device `number`, and makes streams there.
    static Result<std::shared_ptr<Device>> open(std::shared_ptr<DeviceApi> api, int number);
    ~Device();

    [[nodiscard]] int number() const { return number_; }
    [[nodiscard]] DeviceApi& api() const { return *api_; }

    /// The NUMA node of the host that is nearest; -1 if the driver does not say.
    [[nodiscard]] int near_node() const;

    /// Whether it runs nothing any more, after an error that stays, as one for an illegal access.
    [[nodiscard]] bool dead() const { return dead_; }
    void set_dead(bool dead) { dead_ = dead; }

    [[nodiscard]] const CopyStreams& streams(Direction direction) const {
        return direction == Direction::kGather ? save_streams_ : restore_streams_;
    }

    /// An event that comes when what is enqueued on `stream` by now is done.
    Result<std::shared_ptr<DeviceEvent>> record(StreamHandle stream);

    /// Enqueues `copies` on `stream`. Throws std::bad_alloc, and has then enqueued nothing.
    Enqueued copy(Direction direction, std::span<const DeviceCopy> copies, StreamHandle stream);

    /// Makes `stream` of this device wait for `event`, which may be another device's.
    Status hold(StreamHandle stream, const DeviceEvent& event);

  private:
    explicit Device(std::shared_ptr<DeviceApi> api, int number);

    friend class DeviceEvent;

    Result<std::shared_ptr<DeviceEvent>> create_event(StreamHandle stream);
    void give_back(EventHandle event);

    const std::shared_ptr<DeviceApi> api_;
    const int number_;
    bool retained_ = false;
    CopyStreams save_streams_{};  // these two are set by `open`
    CopyStreams restore_streams_{};
    std::atomic<bool> dead_ = false;
    std::mutex mutex_;  // guards what follows
    std::vector<EventHandle> spare_events_;
};

/// One of the driver's, which is used again afterwards: creating and destroying one takes the
/// driver's lock.
class DeviceEvent : public Immovable {
  public:
    explicit DeviceEvent(std::shared_ptr<Device> device) : device_(std::move(device)) {}
    ~DeviceEvent();

    [[nodiscard]] const std::shared_ptr<Device>& device() const { return device_; }
    [[nodiscard]] EventHandle handle() const { return handle_; }
    /// Where it was recorded.
    [[nodiscard]] StreamHandle stream() const { return stream_; }

    /// A fault of work before the event, too.
    Result<bool> is_done() const;

    /// Polls until the event has come (then it is true), or `give_up` is. The driver's own wait
    /// has no way out, should the device hang.
    Result<bool> wait(const std::function<bool()>& give_up) const;

    /// Polls until the device has nothing to do any more with what came before the event, or
    /// `give_up` is true: a fault alone does not say so. Returns the first fault. A fault that
    /// stays is the device's end.
    CopyOutcome wait_idle(const std::function<bool()>& give_up) const;

  private:
    friend class Device;  // which makes them

    std::shared_ptr<Device> device_;
    EventHandle handle_ = 0;  // none: never created
    StreamHandle stream_ = 0;
};

/// Host memory that is pinned for all devices, as long as this lives: no longer than the memory.
class PinnedMemory final : public CachePin {
  public:
    static Result<std::unique_ptr<PinnedMemory>> pin(std::shared_ptr<Device> device,
                                                     std::span<std::byte> memory);
    ~PinnedMemory() override;

  private:
    PinnedMemory(std::shared_ptr<Device> device, std::byte* data)
        : device_(std::move(device)), data_(data) {}

    std::shared_ptr<Device> device_;
    std::byte* data_;
};

}  // namespace datastates
