// Places drawn from a seed: the same ones on every rank and in every look.

#pragma once

#include <cstddef>
#include <cstdint>

namespace datastates {

inline constexpr std::uint64_t kWord = sizeof(std::uint64_t);

/// Smaller tensors are looked at whole.
inline constexpr std::uint64_t kWholeBelow = 64;

/// Tensors whose words are fetched together: a sampled word is nearly always a cache miss.
inline constexpr std::size_t kBatch = 8;

/// The finalizer of splitmix64 (S. Vigna, public domain).
constexpr std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
    return x ^ (x >> 31U);
}

/// What follows `x` in a sequence of draws.
constexpr std::uint64_t next_draw(std::uint64_t x) {
    return mix(x + 0x9E3779B97F4A7C15U);
}

/// An even-ish draw from [0, bound), by the high half of a product (D. Lemire).
inline std::uint64_t draw(std::uint64_t random, std::uint64_t bound) {
    __extension__ using Wide = unsigned __int128;
    return static_cast<std::uint64_t>((static_cast<Wide>(random) * bound) >> 64U);
}

}  // namespace datastates
