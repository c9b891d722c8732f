// A strided region: a rectangular part of an array, in memory on one side and in a stream on the
// other.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/sizes.h"
#include "memory/copies.h"

namespace datastates {

/// One dimension of a region.
struct Axis {
    std::uint64_t size = 0;
    std::uint64_t stream_stride = 0;  ///< bytes
    std::int64_t memory_stride = 0;   ///< bytes
};

/// A region in normal form: runs of bytes that are contiguous on both sides, at steps along axes.
/// In the order of the axes (outer to inner) runs follow each other in the stream and never
/// overlap there, so a range of the stream is a range of runs.
class StridedRegion {
  public:
    /// Joins what is contiguous on both sides. Throws std::invalid_argument if the stream side is
    /// not row-major, or overlaps itself, or is too large.
    StridedRegion(std::uint64_t itemsize, std::span<const Axis> axes);

    /// Bytes copied in all.
    [[nodiscard]] std::uint64_t nbytes() const { return nbytes_; }

    /// Bytes of stream from the first to the last, gaps included. 0 if nothing is copied.
    [[nodiscard]] std::uint64_t span() const { return span_; }

    /// True if both sides are one contiguous run.
    [[nodiscard]] bool contiguous() const { return axes_.empty(); }

    /// The first contiguous run of the stream that ends after `position`, cut to begin there;
    /// empty if there is none. Positions are relative to the region's first byte.
    [[nodiscard]] Range next_run(std::uint64_t position) const;

    /// Copies the bytes at `part` of the region's stream side (relative to its first byte).
    /// `stream` is where byte `part.begin` is, `memory` where element 0 is. Returns the bytes
    /// copied.
    std::uint64_t copy(Direction direction, Range part, std::byte* stream, std::byte* memory) const;

    /// Calls `visit` with the stream position, memory position (both relative to the region's first
    /// byte) and length of every contiguous run in `part` of the region's stream side, cut to it.
    void each_run(
        Range part,
        const std::function<void(std::uint64_t, std::int64_t, std::uint64_t)>& visit) const;

  private:
    class Cursor;

    std::uint64_t run_ = 0;              // bytes of a run
    std::vector<Axis> axes_;             // outer to inner, none of size 1
    std::vector<std::uint64_t> extent_;  // per axis: stream bytes spanned by one of its steps
    std::uint64_t nbytes_ = 0;
    std::uint64_t span_ = 0;
};

}  // namespace datastates
