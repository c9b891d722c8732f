// The devices that an engine uses: opened one by one, and the host cache pinned for them.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "device/device.h"
#include "device/device_lane.h"
#include "memory/host_cache.h"
#include "pipeline/patience.h"

namespace datastates {

class Devices {
  public:
    /// Without an `api`, CUDA's is opened when the first device is.
    Devices(std::shared_ptr<HostCache> cache, std::shared_ptr<DeviceApi> api,
            Clock::duration patience)
        : cache_(std::move(cache)), patience_(patience), api_(std::move(api)) {}
    Devices(const Devices&) = delete;
    Devices& operator=(const Devices&) = delete;
    Devices(Devices&&) = delete;
    Devices& operator=(Devices&&) = delete;
    ~Devices() { shutdown(); }

    /// Makes `device` usable; begins to pin the cache, in a thread. Idempotent.
    MaybeFault open(int device);

    /// Null if it was not opened.
    [[nodiscard]] DeviceLane* lane(int device) const;
    [[nodiscard]] std::shared_ptr<Device> find(int device) const;

    /// Grows the cache, and has the new memory pinned if a device is open. Throws what that throws.
    void grow(std::uint64_t nbytes);

    /// False while what `open` and `grow` have begun goes on.
    [[nodiscard]] bool prepared() const;

    /// Bytes of the cache that are pinned. Copies to and from others are slower, and not
    /// overlapped.
    [[nodiscard]] std::uint64_t pinned_bytes() const { return pinned_bytes_; }
    [[nodiscard]] MaybeFault pin_fault() const;

    /// Who waits for a device of these gives up when this is over.
    [[nodiscard]] const Patience& patience() const { return patience_; }
    void begin_shutdown() { patience_.begin(); }
    void limit_patience() { patience_.limit(); }

    /// Waits until this memory is pinned, if it is the cache's and is going to be. Copies of memory
    /// that is not pinned wait for the device in the driver, with no way out. A fault: patience is
    /// over, and the memory is not to be copied to or from.
    MaybeFault await_pinned(const std::byte* data, std::uint64_t nbytes) const;

    /// Waits for copies under way, for a while. What is pinned stays so, until the cache goes.
    void shutdown();

  private:
    [[nodiscard]] bool is_pinned(const std::byte* data, std::uint64_t nbytes) const;
    void pin_loop();
    bool pin_arena(const std::shared_ptr<Device>& device, const HostCache::Memory& arena);

    const std::shared_ptr<HostCache> cache_;
    Patience patience_;

    mutable std::mutex mutex_;  // guards what follows; taken before the cache's
    std::shared_ptr<DeviceApi> api_;
    std::map<int, std::unique_ptr<DeviceLane>> lanes_;  // only ever added to
    std::condition_variable pin_wanted_;                // pin_, stopping_
    mutable std::condition_variable pin_changed_;  // pinned_, pin_fault_, preparing_, stopping_
    std::map<const std::byte*, std::uint64_t> pinned_;  // pieces, by where they begin
    bool pin_ = false;
    bool preparing_ = false;
    bool stopping_ = false;
    MaybeFault pin_fault_;
    std::jthread pin_thread_;  // ends when stopping_; joined by `shutdown`
    std::atomic<std::uint64_t> pinned_bytes_ = 0;
};

}  // namespace datastates
