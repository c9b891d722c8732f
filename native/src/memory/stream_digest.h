// Digests of chunks of a stream, by which equal bytes are told from different ones.
//
// A digest is a keyed universal hash, in two levels:
//
//   - NH, of each block of 4 KiB, twice with a shifted key (UMAC: Black, Halevi, Krawczyk, Krovetz,
//     Rogaway, CRYPTO '99, theorem 2): two different blocks get the same 256 bits with a
//     probability of at most 2^-128;
//   - a polynomial in a random point over the integers modulo 2^127 - 1, whose coefficients are all
//     blocks' bits in words: two different sequences of n words give the same value with a
//     probability of at most n / (2^127 - 1).
//
// So two different chunks of one size, below 1 TiB, have equal digests with a probability below
// 2^-96, if the key is random and does not depend on the bytes. The key never leaves the process.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/sizes.h"

namespace datastates {

__extension__ using Wide = unsigned __int128;

/// The blocks of NH. Chunks begin at multiples of this.
inline constexpr std::uint64_t kDigestBlockBytes = 4096;
static_assert(kSegmentBytes % kDigestBlockBytes == 0);

/// The random numbers of all digests that are to be compared.
struct DigestKey {
    static constexpr std::size_t kWords = kDigestBlockBytes / sizeof(std::uint64_t);

    std::array<std::uint64_t, kWords + 2> words{};
    Wide point = 0;

    /// Drawn from the system's random numbers. Throws std::runtime_error if it has none.
    static std::shared_ptr<const DigestKey> random();
};

/// The digests of some chunks of one stream, whose parts come in any order, from any threads.
class StreamDigest {
  public:
    using Value = std::array<std::byte, sizeof(Wide)>;

    /// `chunks` are in the order of the stream. Throws std::invalid_argument if they overlap, or if
    /// one does not begin at a multiple of the block's size.
    StreamDigest(std::shared_ptr<const DigestKey> key, std::vector<Range> chunks);

    /// Adds `part` of the stream, which is at `bytes`. It begins at a multiple of the block's size,
    /// and ends at one, or behind all chunks. Every part once.
    void add(Range part, const std::byte* bytes);

    /// The digest of each chunk, once all parts are added.
    [[nodiscard]] std::vector<Value> values() const;

  private:
    const std::shared_ptr<const DigestKey> key_;
    const std::vector<Range> chunks_;

    mutable std::mutex mutex_;  // guards what follows
    std::vector<Wide> sums_;    // of each chunk, of the parts so far
};

}  // namespace datastates
