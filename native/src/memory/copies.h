// A contiguous copy: what the kernel, a device, or a comparison is given in lists.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace datastates {

enum class Direction : std::uint8_t {
    kGather,   ///< memory to stream
    kScatter,  ///< stream to memory
};

/// One contiguous copy. Where one side is a device's, which it is follows from the direction.
struct DeviceCopy {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    std::uint64_t nbytes = 0;
};

/// True if `nbytes` from `data` on lie in `range`.
inline bool lies_in(std::span<const std::byte> range, const std::byte* data, std::uint64_t nbytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(range.data());
    const auto at = reinterpret_cast<std::uintptr_t>(data);
    return at >= begin && at - begin <= range.size() && nbytes <= range.size() - (at - begin);
}

}  // namespace datastates
