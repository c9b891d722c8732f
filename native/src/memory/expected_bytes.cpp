#include "memory/expected_bytes.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "base/sizes.h"
#include "memory/random_places.h"

namespace datastates {
namespace {

constexpr std::uint64_t kLeastWords = 4;
constexpr std::uint64_t kMostWords = ExpectedBytes::kMostWordBytes / kWord;
constexpr std::uint64_t kBytesPerFurtherWord = std::uint64_t{4} << 20U;

std::uint64_t seed_of(std::uint64_t seed, std::size_t tensor) {
    return mix(seed ^ mix(tensor + 1));
}

}  // namespace

void ExpectedBytes::choose(const TensorMemory& memory, std::uint64_t random) {
    const auto add = [&](std::uint64_t offset, std::uint64_t nbytes) {
        pieces_.push_back({.address = memory.address + offset,
                           .nbytes = nbytes,
                           .word = 0,
                           .expected = nullptr,
                           .tensor = memory.tensor,
                           .offset = offset});
    };
    if (memory.nbytes < kWholeBelow) {
        for (std::uint64_t at = 0; at < memory.nbytes; at += kWord) {
            add(at, std::min(kWord, memory.nbytes - at));
        }
        return;
    }
    const std::uint64_t count =
        std::min(kMostWords, kLeastWords + memory.nbytes / kBytesPerFurtherWord);
    const std::uint64_t part = memory.nbytes / count;
    for (std::uint64_t i = 0; i < count; ++i) {
        random = next_draw(random);
        // The last part has what division leaves over.
        const std::uint64_t size = i + 1 < count ? part : memory.nbytes - i * part;
        add(i * part + draw(random, size - kWord + 1), kWord);
        __builtin_prefetch(pieces_.back().address);
    }
}

void ExpectedBytes::add_words(std::span<const TensorMemory> tensors, std::uint64_t seed) {
    pieces_.reserve(pieces_.size() + tensors.size() * kLeastWords);
    longest_ = std::max(longest_, kWord);
    while (!tensors.empty()) {
        const std::size_t first = pieces_.size();
        const auto batch = tensors.first(std::min(kBatch, tensors.size()));
        for (const TensorMemory& memory : batch) choose(memory, seed_of(seed, memory.tensor));
        for (Piece& piece : std::span(pieces_).subspan(first)) {
            std::memcpy(&piece.word, piece.address, piece.nbytes);
        }
        tensors = tensors.subspan(batch.size());
    }
    indexed_ = false;
}

std::vector<DeviceCopy> ExpectedBytes::add_device_words(std::span<const TensorMemory> tensors,
                                                        std::uint64_t seed, std::byte* out) {
    const std::size_t first = pieces_.size();
    longest_ = std::max(longest_, kWord);
    for (const TensorMemory& memory : tensors) choose(memory, seed_of(seed, memory.tensor));
    std::vector<DeviceCopy> copies;
    copies.reserve(pieces_.size() - first);
    for (Piece& piece : std::span(pieces_).subspan(first)) {
        piece.expected = out;
        copies.push_back({.to = out, .from = piece.address, .nbytes = piece.nbytes});
        out += kWord;
    }
    indexed_ = false;
    return copies;
}

void ExpectedBytes::add_whole(const TensorMemory& memory, const std::byte* copy) {
    pieces_.push_back({.address = memory.address,
                       .nbytes = memory.nbytes,
                       .word = 0,
                       .expected = copy,
                       .tensor = memory.tensor,
                       .offset = 0});
    longest_ = std::max(longest_, memory.nbytes);
    indexed_ = false;
}

void ExpectedBytes::index() {
    if (!indexed_) std::ranges::sort(pieces_, std::less<>(), &Piece::address);
    indexed_ = true;
}

std::optional<ExpectedBytes::Difference> ExpectedBytes::differing(
    std::span<const DeviceCopy> copies) const {
    for (const DeviceCopy& copy : copies) {
        const auto begin = reinterpret_cast<std::uintptr_t>(copy.from);
        const std::uintptr_t reach =
            begin - std::min(begin, longest_);  // no earlier piece meets it
        auto piece = std::ranges::lower_bound(pieces_, reach, {}, [](const Piece& each) {
            return reinterpret_cast<std::uintptr_t>(each.address);
        });
        for (; piece != pieces_.end() && piece->address < copy.from + copy.nbytes; ++piece) {
            if (auto difference = compare(*piece, copy)) return difference;
        }
    }
    return std::nullopt;
}

std::optional<ExpectedBytes::Difference> ExpectedBytes::compare(const Piece& piece,
                                                                const DeviceCopy& copy) {
    const std::byte* const begin = std::max(piece.address, copy.from);
    const std::byte* const end = std::min(piece.address + piece.nbytes, copy.from + copy.nbytes);
    if (begin >= end) return std::nullopt;
    const std::span expected(piece.bytes() + (begin - piece.address), end - begin);
    const std::span copied(copy.to + (begin - copy.from), end - begin);
    if (std::memcmp(expected.data(), copied.data(), expected.size()) == 0) return std::nullopt;
    const auto first = std::ranges::mismatch(expected, copied).in1 - expected.begin();
    auto last = static_cast<std::ptrdiff_t>(expected.size());
    while (expected[last - 1] == copied[last - 1]) --last;
    const std::uint64_t offset = piece.offset + (begin - piece.address);
    return Difference{.tensor = piece.tensor, .begin = offset + first, .end = offset + last};
}

}  // namespace datastates
