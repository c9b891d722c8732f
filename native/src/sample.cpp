#include "sample.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace datastates {
namespace {

constexpr std::size_t kWords = 4;
constexpr std::size_t kWholeBelow = 64;

/// A region's words are drawn from one stretch of this size: walking the page tables for a cold
/// page costs several times what fetching a word does.
constexpr std::uint64_t kWindow = 4096;

/// Regions whose words are fetched together: a sampled word is nearly always a cache miss.
constexpr std::size_t kBatch = 8;

/// The finalizer of splitmix64 (S. Vigna, public domain).
constexpr std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
    return x ^ (x >> 31U);
}

/// An even-ish draw from [0, bound), by the high half of a product (D. Lemire).
std::uint64_t draw(std::uint64_t random, std::uint64_t bound) {
    __extension__ using Wide = unsigned __int128;
    return static_cast<std::uint64_t>((static_cast<Wide>(random) * bound) >> 64U);
}

std::uint64_t load(const std::byte* from, std::size_t size) {
    std::uint64_t word = 0;
    std::memcpy(&word, from, size);
    return word;
}

std::uint64_t digest_whole(std::span<const std::byte> region) {
    std::uint64_t digest = mix(region.size());
    for (std::size_t at = 0; at < region.size(); at += sizeof(std::uint64_t)) {
        const std::size_t size = std::min(sizeof(std::uint64_t), region.size() - at);
        digest = mix(digest ^ load(region.data() + at, size));
    }
    return digest;
}

}  // namespace

std::vector<std::uint64_t> sample_words(std::span<const std::span<const std::byte>> regions,
                                        std::uint64_t seed) {
    std::vector<std::uint64_t> digests(regions.size(), 0);
    std::array<std::array<const std::byte*, kWords>, kBatch> places{};
    for (std::size_t first = 0; first < regions.size(); first += kBatch) {
        const std::size_t count = std::min(kBatch, regions.size() - first);
        for (std::size_t i = 0; i < count; ++i) {
            const auto region = regions[first + i];
            if (region.size() < kWholeBelow) continue;
            std::uint64_t random = mix(seed ^ mix(first + i + 1));
            const std::uint64_t window = std::min<std::uint64_t>(region.size(), kWindow);
            const std::byte* const at = region.data() + draw(random, region.size() - window + 1);
            for (auto& place : places.at(i)) {
                random = mix(random + 0x9E3779B97F4A7C15U);
                place = at + draw(random, window - sizeof(std::uint64_t) + 1);
                __builtin_prefetch(place);
            }
        }
        for (std::size_t i = 0; i < count; ++i) {
            const auto region = regions[first + i];
            if (region.empty()) continue;
            std::uint64_t digest = 0;
            if (region.size() < kWholeBelow) {
                digest = digest_whole(region);
            } else {
                digest = mix(region.size());
                for (const std::byte* place : places.at(i)) {
                    digest = mix(digest ^ load(place, sizeof(std::uint64_t)));
                }
            }
            digests[first + i] = digest;
        }
    }
    return digests;
}

}  // namespace datastates
