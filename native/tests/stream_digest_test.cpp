#include "memory/stream_digest.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "support.h"

namespace datastates::testing {
namespace {

using Values = std::vector<StreamDigest::Value>;

const std::shared_ptr<const DigestKey>& key() {
    static const auto drawn = DigestKey::random();
    return drawn;
}

Values digests(const Bytes& stream, const std::vector<Range>& chunks,
               std::vector<Range> parts = {}) {
    StreamDigest digest(key(), chunks);
    if (parts.empty()) parts.push_back({.begin = 0, .end = stream.size()});
    for (const Range& part : parts) digest.add(part, stream.data() + part.begin);
    return digest.values();
}

Values whole(const Bytes& stream) {
    return digests(stream, {{.begin = 0, .end = stream.size()}});
}

/// The same by schoolbook arithmetic, one bit of a product after another.
StreamDigest::Value by_definition(const Bytes& bytes) {
    const Wide prime = (Wide{1} << 127U) - 1;
    const auto times = [&](Wide a, Wide b) {
        Wide result = 0;
        for (unsigned bit = 127; bit-- > 0;) {
            result = result * 2 % prime;
            if ((b >> bit & 1U) != 0) result = (result + a) % prime;
        }
        return result;
    };
    Bytes padded = bytes;
    padded.resize(round_up(bytes.size(), kDigestBlockBytes));
    const auto word = [&](std::size_t at) {
        std::uint64_t value = 0;
        std::memcpy(&value, padded.data() + at * sizeof value, sizeof value);
        return value;
    };
    Wide sum = 0;
    for (std::size_t block = 0; block < padded.size() / 8; block += DigestKey::kWords) {
        for (const std::size_t shift : {std::size_t{0}, std::size_t{2}}) {
            Wide nh = 0;
            for (std::size_t i = 0; i < DigestKey::kWords; i += 2) {
                nh += Wide{word(block + i) + key()->words[i + shift]} *
                      (word(block + i + 1) + key()->words[i + shift + 1]);
            }
            sum = (times(sum, key()->point) + static_cast<std::uint64_t>(nh)) % prime;
            sum = (times(sum, key()->point) + static_cast<std::uint64_t>(nh >> 64U)) % prime;
        }
    }
    StreamDigest::Value value{};
    std::memcpy(value.data(), &sum, sizeof sum);
    return value;
}

void it_is_what_the_header_says() {
    for (const std::size_t size : {0U, 1U, 4095U, 4096U, 4097U, 50'000U}) {
        const Bytes bytes = random_bytes(size, size);
        check(whole(bytes)[0] == by_definition(bytes));
        check(whole(Bytes(size, std::byte{0xff}))[0] ==
              by_definition(Bytes(size, std::byte{0xff})));
    }
}

void every_bit_counts() {
    Bytes bytes = random_bytes(9'000, 1);
    std::set<StreamDigest::Value> seen{whole(bytes)[0]};
    std::size_t different = 1;
    for (std::size_t at = 0; at < bytes.size(); at += at % 4096 < 40 ? 1 : 97) {
        for (const unsigned bit : {0U, 7U}) {
            bytes[at] ^= std::byte{1} << bit;
            seen.insert(whole(bytes)[0]);
            ++different;
            bytes[at] ^= std::byte{1} << bit;
        }
    }
    check_equal(seen.size(), different);
}

void exchanged_words_and_blocks_count() {
    const Bytes bytes = random_bytes(2 * kDigestBlockBytes, 2);
    for (const std::size_t size : {std::size_t{8}, std::size_t{16}, std::size_t{4096}}) {
        Bytes other = bytes;
        std::swap_ranges(other.begin(), other.begin() + static_cast<std::ptrdiff_t>(size),
                         other.begin() + static_cast<std::ptrdiff_t>(size));
        check(whole(other) != whole(bytes));
    }
}

void a_chunk_has_one_digest_wherever_it_is_and_however_it_comes() {
    const Bytes stream = random_bytes(64 * kDigestBlockBytes, 3);
    const std::vector<Range> chunks{{.begin = 0, .end = 5},
                                    {.begin = 4096, .end = 4096},
                                    {.begin = 8192, .end = 100'000},
                                    {.begin = 102'400, .end = 200'000}};
    const Values expected = digests(stream, chunks);
    for (std::size_t i = 0; i < chunks.size(); ++i) {
        const auto* const begin = stream.data();
        check(whole(Bytes(begin + chunks[i].begin, begin + chunks[i].end))[0] == expected[i]);
    }
    std::vector<Range> parts;
    for (std::uint64_t at = 0; at < stream.size(); at += 3 * kDigestBlockBytes) {
        parts.push_back(
            {.begin = at,
             .end = std::min<std::uint64_t>(at + 3 * kDigestBlockBytes, stream.size())});
    }
    std::ranges::reverse(parts);
    check(digests(stream, chunks, parts) == expected);
}

void other_keys_give_other_digests() {
    const Bytes bytes = random_bytes(100, 4);
    StreamDigest other(DigestKey::random(), {{.begin = 0, .end = bytes.size()}});
    other.add({.begin = 0, .end = bytes.size()}, bytes.data());
    check(other.values() != whole(bytes));
}

void chunks_that_cannot_be_are_refused() {
    const auto make = [](std::vector<Range> chunks) {
        return [chunks] { const StreamDigest digest(key(), chunks); };
    };
    check_throws<std::invalid_argument>("aligned", make({{.begin = 8, .end = 16}}));
    check_throws<std::invalid_argument>(
        "behind", make({{.begin = 0, .end = 4097}, {.begin = 4096, .end = 4098}}));
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases({{"it_is_what_the_header_says", it_is_what_the_header_says},
                      {"every_bit_counts", every_bit_counts},
                      {"exchanged_words_and_blocks_count", exchanged_words_and_blocks_count},
                      {"a_chunk_has_one_digest_wherever_it_is_and_however_it_comes",
                       a_chunk_has_one_digest_wherever_it_is_and_however_it_comes},
                      {"other_keys_give_other_digests", other_keys_give_other_digests},
                      {"chunks_that_cannot_be_are_refused", chunks_that_cannot_be_are_refused}});
}
