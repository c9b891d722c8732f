// The sizes that the engine and the file format are built on.

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace datastates {

/// A host cache segment, and the cut of a file that it holds.
inline constexpr std::uint64_t kSegmentBytes = std::uint64_t{8} << 20U;

/// What one stored CRC32C covers. Divides the segment, so that no block straddles two of them.
inline constexpr std::uint64_t kBlockBytes = std::uint64_t{1} << 20U;
static_assert(kSegmentBytes % kBlockBytes == 0);

/// Three segments for saves (one of which may be a slab), one for restores.
inline constexpr std::uint64_t kMinSegments = 4;

/// Alignment of memory, offset and length that O_DIRECT is satisfied with everywhere.
inline constexpr std::uint64_t kDirectAlignment = 4096;
static_assert(kBlockBytes % kDirectAlignment == 0);

/// The largest offset that a file can have.
inline constexpr std::uint64_t kMaxPosition = std::numeric_limits<std::int64_t>::max();

constexpr std::uint64_t divide_up(std::uint64_t value, std::uint64_t unit) {
    return value / unit + (value % unit == 0 ? 0 : 1);
}

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
    return divide_up(value, unit) * unit;
}

/// Bytes [begin, end) of a stream or file.
struct Range {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;

    [[nodiscard]] constexpr std::uint64_t size() const { return end - begin; }
};

}  // namespace datastates
