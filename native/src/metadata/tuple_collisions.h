// Tuples of integers made to collide in Python's hash.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace datastates {

/// Counts different tuples of integers whose hashes in Python are the same: such keys make a dict
/// quadratic. By chance there are none among millions; by design there may be any number, because
/// the hash has no key (unlike that of strings).
class TupleCollisions {
  public:
    /// Adds the tuple of `integer(0)`, `integer(1)` ... up to `size`.
    template <typename Integers>
    void add(std::size_t size, const Integers& integer) {
        std::uint64_t python = kPrime5;
        std::uint64_t content = seed_ + size;
        for (std::size_t i = 0; i < size; ++i) {
            const std::uint64_t value = integer(i);
            python = std::rotl(python + (lane(value) * kPrime2), 31) * kPrime1;
            content = (std::rotl(content, 23) ^ value) * kOdd;
        }
        python += size ^ (kPrime5 ^ 3527539U);
        const auto found = std::pair(python, content);
        auto& recent = recent_[content >> (64U - kRecentBits)];
        if (recent == found) return;
        recent = found;
        seen_.push_back(found);
    }

    /// How many tuples share their hash with a different one.
    unsigned count() {
        std::ranges::sort(seen_);
        const auto repeated = std::ranges::unique(seen_);
        seen_.erase(repeated.begin(), repeated.end());
        unsigned collisions = 0;
        for (std::size_t i = 1; i < seen_.size(); ++i) {
            if (seen_[i].first == seen_[i - 1].first) ++collisions;
        }
        return collisions;
    }

  private:
    // tuplehash in CPython's Objects/tupleobject.c since 3.8 (a simplified xxHash).
    static constexpr std::uint64_t kPrime1 = 11400714785074694791U;
    static constexpr std::uint64_t kPrime2 = 14029467366897019727U;
    static constexpr std::uint64_t kPrime5 = 2870177450012600261U;
    static constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15U;
    static constexpr unsigned kRecentBits = 10;

    /// hash(int): the value modulo the Mersenne prime 2^61 - 1, with its sign; -1 means an error.
    static std::uint64_t lane(std::uint64_t value) {
        constexpr std::uint64_t kModulus = (std::uint64_t{1} << 61U) - 1;
        const bool negative = value >> 63U != 0;
        const std::uint64_t hash = (negative ? 0 - value : value) % kModulus;
        if (!negative) return hash;
        return hash == 1 ? 0 - std::uint64_t{2} : 0 - hash;
    }

    // Different for each, or tuples could be made to look the same here as well.
    std::uint64_t seed_ = (std::uint64_t{std::random_device{}()} << 32U) | std::random_device{}();
    std::vector<std::pair<std::uint64_t, std::uint64_t>> seen_;
    // Most tuples (the sizes of chunks) are those of a moment ago.
    std::array<std::pair<std::uint64_t, std::uint64_t>, std::size_t{1} << kRecentBits> recent_{};
};

}  // namespace datastates
