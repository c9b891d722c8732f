// The devices that an engine uses: opened one by one, and the host cache pinned for them.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/immovable.h"
#include "base/patience.h"
#include "device/device.h"
#include "device/device_lane.h"
#include "device/pinner.h"
#include "memory/host_cache.h"
#include "memory/transfer.h"

namespace datastates {

class Devices : public Immovable {
  public:
    /// Without an `api`, CUDA's is opened when the first device is. Saves copy at most
    /// `bytes_per_second` from each device (0: no limit).
    Devices(std::shared_ptr<HostCache> cache, std::shared_ptr<DeviceApi> api,
            Clock::duration patience, std::uint64_t bytes_per_second = 0)
        : patience_(patience),
          bytes_per_second_(bytes_per_second),
          pinner_(std::move(cache), patience_),
          api_(std::move(api)) {}
    ~Devices() { shutdown(); }

    /// Makes `device` usable; begins to pin the cache, in a thread. Idempotent.
    Status open(int device);

    /// Null if it was not opened.
    [[nodiscard]] std::shared_ptr<Device> find(int device) const;

    [[nodiscard]] Pinner& pinner() { return pinner_; }

    /// Those who wait for a device give up when patience is over.
    void begin_shutdown() { patience_.begin(); }
    void limit_patience() { patience_.limit(); }

    using Queued =
        std::function<void(const std::vector<GroupBytes>& groups, const DeviceLane::Events&)>;
    /// Has devices make the copies of `work`, from or to one segment of the cache: what is not
    /// pinned yet is waited for. `queued` is called in this thread, once for each device, as
    /// DeviceLane::copy does; `done` once, by the last that is done. `work` must live until then.
    /// Throws std::bad_alloc, and has then done nothing.
    void copy(Direction direction, std::span<const std::byte> segment,
              const std::map<int, DeviceWork>& work, JobFences& fences, const Queued& queued,
              DeviceLane::Done done);

    /// Waits for copies under way, for a while. What is pinned stays so, until the cache goes.
    void shutdown();

  private:
    struct Opened {
        Opened(const std::shared_ptr<Device>& device, const Patience& patience,
               std::uint64_t bytes_per_second)
            : from(device, Direction::kGather, patience, bytes_per_second),
              to(device, Direction::kScatter, patience) {}

        DeviceLane from;
        DeviceLane to;
    };

    [[nodiscard]] Opened* find_opened(int device) const;

    Patience patience_;
    const std::uint64_t bytes_per_second_;
    Pinner pinner_;

    std::mutex opening_;  // held while the driver is called; guards api_; taken before mutex_
    std::shared_ptr<DeviceApi> api_;
    mutable std::mutex mutex_;  // guards what follows; taken before the pinner's
    std::map<int, std::unique_ptr<Opened>> opened_;  // only ever added to
    bool stopping_ = false;
};

}  // namespace datastates
