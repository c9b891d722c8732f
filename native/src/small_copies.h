// Copies of many small pieces of a device's memory to the host, by a kernel: a copy engine takes
// about a microsecond for each piece, whatever its size.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "device_api.h"
#include "fault.h"

namespace datastates {

class Device;

/// Pieces up to this are small: a link of today takes another microsecond for as much.
inline constexpr std::uint64_t kSmallCopy = std::uint64_t{64} << 10U;

class SmallCopies {
  public:
    /// Loads the kernel, and uses it from then on if it copies some host memory as it should.
    /// Returns why it is not used, if so. For a thread that nobody waits for; until `give_up`.
    MaybeFault load(const std::shared_ptr<Device>& device, const std::function<bool()>& give_up);

    /// Any thread.
    [[nodiscard]] bool loaded() const { return kernel_ != 0; }

    /// Enqueues those of `copies`, to the host, that the kernel had better make, and adds the
    /// others to `rest`. The calling thread is bound to the device.
    MaybeFault enqueue(DeviceApi& api, std::span<const DeviceCopy> copies, StreamHandle stream,
                       std::vector<DeviceCopy>& rest) const;

  private:
    std::atomic<KernelHandle> kernel_ = 0;
};

}  // namespace datastates
