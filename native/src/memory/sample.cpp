#include "memory/sample.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "memory/guarded_copy.h"
#include "memory/random_places.h"

namespace datastates {
namespace {

constexpr std::size_t kWords = 4;
/// A region's words are drawn from one stretch of this size: walking the page tables for a cold
/// page costs several times what fetching a word does.
constexpr std::uint64_t kWindow = 4096;

std::uint64_t load(const std::byte* from, std::size_t size) {
    std::uint64_t word = 0;
    std::memcpy(&word, from, size);
    return word;
}

/// The places in one region that are looked at: all of a small one, or `kWords` words.
struct Places {
    std::array<DeviceCopy, kWords> pieces{};
    std::size_t count = 0;
    std::array<std::byte, kWholeBelow> fetched{};

    [[nodiscard]] std::span<const DeviceCopy> list() const {
        return std::span(pieces).first(count);
    }

    void choose(std::span<const std::byte> region, std::uint64_t random) {
        count = 0;
        if (region.empty()) return;
        if (region.size() < kWholeBelow) {
            pieces[count++] = {
                .to = fetched.data(), .from = region.data(), .nbytes = region.size()};
            return;
        }
        const std::uint64_t window = std::min<std::uint64_t>(region.size(), kWindow);
        const std::byte* const at = region.data() + draw(random, region.size() - window + 1);
        for (DeviceCopy& piece : pieces) {
            random = next_draw(random);
            piece = {.to = fetched.data() + count++ * kWord,
                     .from = at + draw(random, window - kWord + 1),
                     .nbytes = kWord};
            __builtin_prefetch(piece.from);
        }
    }

    [[nodiscard]] bool fetch(bool guarded) const {
        if (guarded) return copy_guarded(list()) == 0;
        for (const DeviceCopy& piece : list()) std::memcpy(piece.to, piece.from, piece.nbytes);
        return true;
    }

    [[nodiscard]] std::uint64_t digest(std::uint64_t nbytes) const {
        std::uint64_t digest = mix(nbytes);
        for (const DeviceCopy& piece : list()) {
            for (std::uint64_t at = 0; at < piece.nbytes; at += kWord) {
                digest = mix(digest ^ load(piece.to + at, std::min(kWord, piece.nbytes - at)));
            }
        }
        return digest;
    }
};

}  // namespace

std::vector<std::uint64_t> sample_words(std::span<const std::span<const std::byte>> regions,
                                        std::uint64_t seed, bool guarded) {
    std::vector<std::uint64_t> digests(regions.size(), 0);
    std::array<Places, kBatch> places;
    for (std::size_t first = 0; first < regions.size(); first += kBatch) {
        const std::size_t count = std::min(kBatch, regions.size() - first);
        for (std::size_t i = 0; i < count; ++i) {
            places.at(i).choose(regions[first + i], mix(seed ^ mix(first + i + 1)));
        }
        for (std::size_t i = 0; i < count; ++i) {
            if (places.at(i).count == 0 || !places.at(i).fetch(guarded)) continue;
            digests[first + i] = places.at(i).digest(regions[first + i].size());
        }
    }
    return digests;
}

}  // namespace datastates
