// Copies between memory and positions of one byte stream: the list, and its sorted form.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/sizes.h"
#include "memory/copies.h"
#include "memory/strided_region.h"

namespace datastates {

using Group = std::int64_t;

/// Memory that cannot go away before it is copied. That of all other groups is the program's: it
/// may be unmapped at any time, and is read as such.
inline constexpr Group kStableGroup = 0;

/// Bytes of one group.
struct GroupBytes {
    Group group = 0;
    std::uint64_t nbytes = 0;
};

/// Means every group, where a caller names one.
inline constexpr Group kEveryGroup = -1;

/// Where memory is: the host, or a device by its number.
inline constexpr int kHost = -1;

/// Where a region may be copied to or from.
enum class Access : std::uint8_t { kReadWrite, kReadOnly };

/// One copy: stream bytes [offset, end), or those of them that `strided` has, and memory.
struct Region {
    std::uint64_t offset = 0;
    std::uint64_t end = 0;
    std::byte* address = nullptr;
    Group group = 0;
    std::shared_ptr<const StridedRegion> strided;  ///< null: all bytes, contiguous in memory
    Access access = Access::kReadWrite;
    int device = kHost;

    [[nodiscard]] std::uint64_t nbytes() const {
        return strided ? strided->nbytes() : end - offset;
    }

    /// Copies what lies in `part` of the stream, of which `stream` has the first byte. Host memory.
    std::uint64_t copy(Direction direction, Range part, std::byte* stream) const;

    /// The same as copies for the device that has this region. Returns their bytes.
    std::uint64_t list(Direction direction, Range part, std::byte* stream,
                       std::vector<DeviceCopy>& copies) const;

    /// True if a byte of `part` of the stream is this region's.
    [[nodiscard]] bool touches(Range part) const;
};

/// A list of copies under construction. Arguments that make no sense throw std::invalid_argument.
class Transfer {
  public:
    void add(std::uint64_t offset, std::uint64_t nbytes, std::byte* address, Group group,
             Access access = Access::kReadWrite, int device = kHost);
    void add_strided(std::uint64_t offset, std::uint64_t itemsize, std::span<const Axis> axes,
                     std::byte* address, Group group, int device = kHost);
    void append(const Transfer& other);
    void reserve(std::size_t regions) { regions_.reserve(regions); }

    [[nodiscard]] std::uint64_t nbytes() const { return nbytes_; }
    [[nodiscard]] const std::vector<Region>& regions() const { return regions_; }

  private:
    void push(Region region);

    std::vector<Region> regions_;  // none of them empty
    std::uint64_t nbytes_ = 0;
};

/// Copies that a device is to make, and how many bytes of which groups they are.
struct DeviceWork {
    std::vector<DeviceCopy> copies;
    std::vector<GroupBytes> groups;
};

/// The copies of one stream, sorted and checked. Immutable, so any thread may read it.
class StreamContent {
  public:
    /// Throws std::invalid_argument if two regions overlap in the stream.
    explicit StreamContent(const Transfer& transfer);

    [[nodiscard]] const std::vector<Region>& regions() const { return regions_; }
    [[nodiscard]] std::uint64_t nbytes() const { return nbytes_; }

    /// One past the last byte that a region covers (0: none).
    [[nodiscard]] std::uint64_t end() const { return reach_.empty() ? 0 : reach_.back(); }

    /// True if some region's memory must not be written.
    [[nodiscard]] bool has_read_only() const;

    /// The regions whose span meets `part`, and perhaps some that do not.
    [[nodiscard]] std::span<const Region> near(Range part) const;

    /// The devices that have some region, each once.
    [[nodiscard]] const std::vector<int>& devices() const { return devices_; }

    /// What `fill` has copied; or why it could not (an errno; EFAULT: memory is gone).
    struct Filled {
        std::vector<GroupBytes> groups;
        std::vector<DeviceCopy> unstable;  ///< the copies from memory that is not stable
        int error = 0;
    };

    /// Fills `out` with `part` of the stream: the bytes of regions on the host, and zeros where
    /// there are none. Where regions of devices go, anything may be afterwards.
    [[nodiscard]] Filled fill(Range part, std::byte* out) const;

    /// Copies `part` in either direction, leaving alone what no region on the host covers.
    void copy(Direction direction, Range part, std::byte* stream) const;

    /// What devices have to copy for `part`, by device; adds to `work`.
    void list(Direction direction, Range part, std::byte* stream,
              std::map<int, DeviceWork>& work) const;

    /// True if some region has a byte in `part`.
    [[nodiscard]] bool touches(Range part) const;

  private:
    void check_overlaps() const;

    std::vector<Region> regions_;       // by offset
    std::vector<std::uint64_t> reach_;  // largest end among regions_[0..i]: grows with i
    std::vector<int> devices_;
    std::uint64_t nbytes_ = 0;
};

}  // namespace datastates
