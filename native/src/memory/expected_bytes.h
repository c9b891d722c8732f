// What memory held at one moment, in samples or whole, to compare with the bytes that are copied
// from it later. So a write that nothing announces shows even if it is undone before the end.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "memory/copies.h"

namespace datastates {

/// The memory of one tensor, on the host or a device.
struct TensorMemory {
    std::size_t tensor = 0;  ///< the caller's number for it
    const std::byte* address = nullptr;
    std::uint64_t nbytes = 0;
};

/// Built by one thread. Once `index` has returned, any thread may compare.
class ExpectedBytes {
  public:
    /// Bytes of `out` that `add_device_words` needs for each tensor, at most.
    static constexpr std::uint64_t kMostWordBytes = 128;

    /// Reads words at places drawn from `seed`, one in each of several equal parts of the tensor:
    /// a write to a fraction f of the tensor escapes its n words with a probability of at most
    /// (1-f)^n. n is 4, and one more for each 4 MiB, up to 16.
    void add_words(std::span<const TensorMemory> tensors, std::uint64_t seed);

    /// The same for memory of devices: returns the copies that put the words into `out`, which must
    /// outlive this. They must be made before `differing` is called.
    std::vector<DeviceCopy> add_device_words(std::span<const TensorMemory> tensors,
                                             std::uint64_t seed, std::byte* out);

    /// Expects all bytes of `memory` to be those of `copy`, which must outlive this.
    void add_whole(const TensorMemory& memory, const std::byte* copy);

    /// Call it after the last `add_…`. Idempotent.
    void index();

    struct Difference {
        std::size_t tensor = 0;
        std::uint64_t begin = 0;  ///< the first byte of the tensor that is known to differ
        std::uint64_t end = 0;    ///< one past the last of the same copy
    };
    /// The first difference between what was expected and what `copies` have copied.
    [[nodiscard]] std::optional<Difference> differing(std::span<const DeviceCopy> copies) const;

  private:
    struct Piece {
        const std::byte* address = nullptr;
        std::uint64_t nbytes = 0;
        std::uint64_t word = 0;               // the bytes, if `expected` is null
        const std::byte* expected = nullptr;  // where they are
        std::size_t tensor = 0;
        std::uint64_t offset = 0;  // in the tensor

        [[nodiscard]] const std::byte* bytes() const {
            return expected != nullptr ? expected : reinterpret_cast<const std::byte*>(&word);
        }
    };

    void choose(const TensorMemory& memory, std::uint64_t random);
    [[nodiscard]] static std::optional<Difference> compare(const Piece& piece,
                                                           const DeviceCopy& copy);

    std::vector<Piece> pieces_;
    std::uint64_t longest_ = 0;  // of a piece
    bool indexed_ = false;       // pieces_ are in the order of their addresses
};

}  // namespace datastates
