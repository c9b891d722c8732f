#include "memory/expected_bytes.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "check.h"
#include "support.h"

namespace datastates::testing {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20U;

TensorMemory memory_of(const Bytes& data, std::size_t tensor = 0) {
    return {.tensor = tensor, .address = data.data(), .nbytes = data.size()};
}

/// `data`, copied in pieces of `piece` bytes.
std::vector<DeviceCopy> copies_of(const Bytes& data, Bytes& out, std::uint64_t piece) {
    out = data;
    std::vector<DeviceCopy> copies;
    for (std::uint64_t at = 0; at < data.size(); at += piece) {
        copies.push_back({.to = out.data() + at,
                          .from = data.data() + at,
                          .nbytes = std::min(piece, data.size() - at)});
    }
    return copies;
}

void unchanged_memory_is_as_expected() {
    for (const std::size_t size : {std::size_t{1}, std::size_t{63}, std::size_t{64}, kMiB + 3}) {
        const Bytes data = random_bytes(size, 1);
        ExpectedBytes words;
        words.add_words(std::array{memory_of(data)}, 7);
        words.index();
        Bytes out;
        for (const std::uint64_t piece : {std::uint64_t{5}, std::uint64_t{4096}, 2 * kMiB}) {
            check(!words.differing(copies_of(data, out, piece)));
        }
    }
}

/// The bytes of which a change is seen, with the words of one seed.
std::size_t seen_bytes(Bytes& data, std::uint64_t seed, std::uint64_t piece) {
    ExpectedBytes words;
    words.add_words(std::array{memory_of(data, 3)}, seed);
    words.index();
    Bytes out;
    std::size_t seen = 0;
    for (std::size_t at = 0; at < data.size(); ++at) {
        data[at] ^= std::byte{1};
        const auto difference = words.differing(copies_of(data, out, piece));
        data[at] ^= std::byte{1};
        if (!difference) continue;
        ++seen;
        check_equal(difference->tensor, 3U);
        check_equal(difference->begin, at);
        check_equal(difference->end, at + 1);
    }
    return seen;
}

void a_change_of_a_sampled_byte_is_seen_however_the_copy_is_cut() {
    Bytes data = random_bytes(1000, 2);
    for (const std::uint64_t piece : {std::uint64_t{1}, std::uint64_t{3}, std::uint64_t{1000}}) {
        check_equal(seen_bytes(data, 5, piece), 4U * 8U);
    }
    Bytes small = random_bytes(63, 2);
    check_equal(seen_bytes(small, 5, 63), 63U);
}

void words_come_from_all_over_the_tensor() {
    Bytes data(64 * kMiB, std::byte{0});
    ExpectedBytes words;
    words.add_words(std::array{memory_of(data)}, 11);
    words.index();
    Bytes out;
    for (std::uint64_t part = 0; part < 16; ++part) {
        const std::uint64_t begin = part * 4 * kMiB;
        std::memset(data.data() + begin, 1, 4 * kMiB);
        const auto difference = words.differing(copies_of(data, out, 8 * kMiB));
        check(difference.has_value());
        check(difference->begin >= begin && difference->end <= begin + 4 * kMiB);
        std::memset(data.data() + begin, 0, 4 * kMiB);
    }
}

void many_seeds_reach_every_byte() {
    Bytes data(200, std::byte{0});
    std::vector<bool> reached(data.size());
    for (std::uint64_t seed = 0; seed < 500; ++seed) {
        ExpectedBytes words;
        words.add_words(std::array{memory_of(data)}, seed);
        words.index();
        for (std::size_t at = 0; at < data.size(); ++at) {
            std::byte changed{1};
            const DeviceCopy copy{.to = &changed, .from = data.data() + at, .nbytes = 1};
            if (words.differing(std::array{copy})) reached[at] = true;
        }
    }
    check(std::ranges::all_of(reached, [](bool is) { return is; }));
}

void device_words_are_compared_once_their_copies_are_made() {
    const Bytes data = random_bytes(kMiB, 4);
    Bytes words_at(ExpectedBytes::kMostWordBytes);
    ExpectedBytes words;
    for (const auto& copy :
         words.add_device_words(std::array{memory_of(data)}, 9, words_at.data())) {
        std::memcpy(copy.to, copy.from, copy.nbytes);
    }
    words.index();
    Bytes out;
    auto copies = copies_of(data, out, 4096);
    check(!words.differing(copies));
    std::ranges::fill(out, std::byte{0});
    check(words.differing(copies).has_value());
}

void whole_tensors_are_compared_byte_by_byte() {
    Bytes first = random_bytes(10'000, 5);
    const Bytes second = random_bytes(50, 6);
    const Bytes copy = first;
    ExpectedBytes all;
    all.add_whole(memory_of(first, 0), copy.data());
    all.add_whole(memory_of(second, 1), second.data());
    all.index();
    Bytes out;
    check(!all.differing(copies_of(second, out, 50)));
    for (const std::size_t at : {std::size_t{0}, std::size_t{4095}, std::size_t{9'999}}) {
        first[at] ^= std::byte{1};
        const auto difference = all.differing(copies_of(first, out, 4096));
        first[at] ^= std::byte{1};
        check(difference.has_value());
        check_equal(difference->tensor, 0U);
        check_equal(difference->begin, at);
        check_equal(difference->end, at + 1);
    }
}

void tensors_over_the_same_memory_are_all_compared() {
    Bytes data = random_bytes(100'000, 7);
    ExpectedBytes words;
    for (std::size_t tensor = 0; tensor < 3; ++tensor) {
        words.add_words(std::array{memory_of(data, tensor)}, 1);
    }
    words.index();
    Bytes out;
    check(!words.differing(copies_of(data, out, 4096)));
    std::ranges::fill(data, std::byte{0});
    check(words.differing(copies_of(data, out, 4096)).has_value());
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<
        unchanged_memory_is_as_expected, a_change_of_a_sampled_byte_is_seen_however_the_copy_is_cut,
        words_come_from_all_over_the_tensor, many_seeds_reach_every_byte,
        device_words_are_compared_once_their_copies_are_made,
        whole_tensors_are_compared_byte_by_byte, tensors_over_the_same_memory_are_all_compared>();
}
