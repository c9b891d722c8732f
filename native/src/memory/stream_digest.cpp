#include "memory/stream_digest.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>

namespace datastates {
namespace {

constexpr Wide kPrime = (Wide{1} << 127U) - 1;
constexpr std::uint64_t kBlockValues = 4;  // words that a block is digested to

/// Modulo the prime, of a number below 2^128.
Wide reduced(Wide value) {
    value = (value & kPrime) + (value >> 127U);
    return value >= kPrime ? value - kPrime : value;
}

/// Modulo the prime, of two numbers below it.
Wide product(Wide a, Wide b) {
    const auto low_of = [](Wide value) { return static_cast<std::uint64_t>(value); };
    const auto high_of = [](Wide value) { return static_cast<std::uint64_t>(value >> 64U); };
    const Wide low = Wide{low_of(a)} * low_of(b);
    // Both below 2^127, so their sum is below 2^128.
    const Wide middle = Wide{low_of(a)} * high_of(b) + Wide{high_of(a)} * low_of(b);
    const Wide high = Wide{high_of(a)} * high_of(b);
    // a b = high 2^128 + middle 2^64 + low, and 2^127 is 1.
    const Wide sum = low + (middle << 64U);
    const Wide carry = (sum < low ? 1 : 0) + high_of(middle) + high;  // times 2^128, which is 2
    return reduced(reduced(sum) + reduced(carry << 1U));
}

Wide power(Wide base, std::uint64_t exponent) {
    Wide result = 1;
    for (; exponent > 0; exponent >>= 1U, base = product(base, base)) {
        if ((exponent & 1U) != 0) result = product(result, base);
    }
    return result;
}

std::uint64_t word_at(const std::byte* bytes) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes, sizeof word);
    return word;
}

/// NH of a block, with the key and with the key shifted by two words.
std::array<std::uint64_t, kBlockValues> block_values(const DigestKey& key, const std::byte* block) {
    Wide first = 0;
    Wide second = 0;
    const std::uint64_t* const keys = key.words.data();
    for (std::size_t at = 0; at < DigestKey::kWords; at += 2) {
        const std::uint64_t a = word_at(block + at * sizeof a);
        const std::uint64_t b = word_at(block + (at + 1) * sizeof b);
        first += Wide{a + keys[at]} * (b + keys[at + 1]);
        second += Wide{a + keys[at + 2]} * (b + keys[at + 3]);
    }
    return {static_cast<std::uint64_t>(first), static_cast<std::uint64_t>(first >> 64U),
            static_cast<std::uint64_t>(second), static_cast<std::uint64_t>(second >> 64U)};
}

/// The polynomial of what `sum` is of, and one block more.
Wide with_block(const DigestKey& key, Wide sum, const std::byte* block) {
    for (const std::uint64_t value : block_values(key, block)) {
        sum = reduced(product(sum, key.point) + value);
    }
    return sum;
}

/// The polynomial of `size` bytes; what is missing in the last block counts as zeros.
Wide polynomial(const DigestKey& key, const std::byte* bytes, std::uint64_t size) {
    Wide sum = 0;
    for (std::uint64_t done = 0; done < size; done += kDigestBlockBytes) {
        const std::byte* const block = bytes + done;
        if (size - done >= kDigestBlockBytes) {
            sum = with_block(key, sum, block);
        } else {
            std::array<std::byte, kDigestBlockBytes> padded{};
            std::memcpy(padded.data(), block, size - done);
            sum = with_block(key, sum, padded.data());
        }
    }
    return sum;
}

}  // namespace

std::shared_ptr<const DigestKey> DigestKey::random() {
    std::random_device source;
    const auto draw = [&source] {
        return std::uint64_t{source()} << 32U | std::uint64_t{source()};
    };
    auto key = std::make_shared<DigestKey>();
    for (std::uint64_t& word : key->words) word = draw();
    // Of 2^127 draws, two are the point 0, and one each of the others.
    key->point = reduced((Wide{draw()} << 64U | draw()) & kPrime);
    return key;
}

StreamDigest::StreamDigest(std::shared_ptr<const DigestKey> key, std::vector<Range> chunks)
    : key_(std::move(key)), chunks_(std::move(chunks)), sums_(chunks_.size()) {
    std::uint64_t end = 0;
    for (const Range& chunk : chunks_) {
        if (chunk.begin % kDigestBlockBytes != 0 || chunk.begin < end || chunk.end < chunk.begin) {
            throw std::invalid_argument("a chunk begins at " + std::to_string(chunk.begin) +
                                        " and ends at " + std::to_string(chunk.end) +
                                        ": it is not aligned, or not behind the one before");
        }
        end = chunk.end;
    }
}

void StreamDigest::add(Range part, const std::byte* bytes) {
    auto chunk = std::ranges::upper_bound(chunks_, part.begin, {}, &Range::end);
    for (; chunk != chunks_.end() && chunk->begin < part.end; ++chunk) {
        const std::uint64_t begin = std::max(chunk->begin, part.begin);
        const std::uint64_t end = std::min(chunk->end, part.end);
        if (begin >= end) continue;
        const Wide sum = polynomial(*key_, bytes + (begin - part.begin), end - begin);
        const std::uint64_t later = divide_up(chunk->end - end, kDigestBlockBytes) * kBlockValues;
        const Wide placed = product(sum, power(key_->point, later));
        const std::scoped_lock lock(mutex_);
        Wide& whole = sums_[static_cast<std::size_t>(chunk - chunks_.begin())];
        whole = reduced(whole + placed);
    }
}

std::vector<StreamDigest::Value> StreamDigest::values() const {
    const std::scoped_lock lock(mutex_);
    std::vector<Value> values;
    values.reserve(sums_.size());
    for (const Wide sum : sums_) values.push_back(std::bit_cast<Value>(sum));
    return values;
}

}  // namespace datastates
