#include "memory/transfer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "memory/gather.h"
#include "support.h"

namespace datastates::testing {
namespace {

/// A random slice of a random row-major array on the stream side; any layout in memory.
struct RandomRegion {
    explicit RandomRegion(Random& random) {
        constexpr std::array<std::uint64_t, 7> kItems{1, 2, 3, 4, 8, 16, 24};
        itemsize = kItems.at(random_below(random, kItems.size()));
        const std::size_t rank = random_below(random, 5);
        std::vector<std::size_t> memory_order(rank);
        for (std::size_t i = 0; i < rank; ++i) memory_order[i] = i;
        if (random_below(random, 2) == 0) std::ranges::shuffle(memory_order, random);
        axes.resize(rank);
        std::uint64_t stride = itemsize;
        for (std::size_t i = rank; i-- > 0;) {
            const std::uint64_t whole = 1 + random_below(random, 7);
            const bool empty = random_below(random, 30) == 0;
            axes[i].size = empty ? 0 : 1 + random_below(random, whole);
            axes[i].stream_stride = stride;
            stride *= whole;
        }
        auto memory_stride = static_cast<std::int64_t>(itemsize);
        for (const std::size_t i : memory_order) {
            axes[i].memory_stride = memory_stride;
            memory_stride *= static_cast<std::int64_t>(std::max<std::uint64_t>(1, axes[i].size) +
                                                       random_below(random, 2));
        }
        stream_bytes = stride;
        memory_bytes = static_cast<std::uint64_t>(memory_stride);
    }

    /// Calls visit(position in stream, position in memory) for every byte.
    template <typename Visit>
    void each_byte(Visit&& visit) const {
        if (std::ranges::any_of(axes, [](const Axis& axis) { return axis.size == 0; })) return;
        std::vector<std::uint64_t> index(axes.size(), 0);
        while (true) {
            std::uint64_t stream = 0;
            std::int64_t memory = 0;
            for (std::size_t i = 0; i < axes.size(); ++i) {
                stream += index[i] * axes[i].stream_stride;
                memory += static_cast<std::int64_t>(index[i]) * axes[i].memory_stride;
            }
            for (std::uint64_t b = 0; b < itemsize; ++b) {
                visit(stream + b, static_cast<std::uint64_t>(memory) + b);
            }
            std::size_t axis = axes.size();
            while (axis > 0 && ++index[axis - 1] == axes[axis - 1].size) index[--axis] = 0;
            if (axis == 0) return;
        }
    }

    std::uint64_t itemsize;
    std::vector<Axis> axes;
    std::uint64_t stream_bytes;
    std::uint64_t memory_bytes;
};

void random_boxes_match_brute_force() {
    Random random(1);
    for (int round = 0; round < 4000; ++round) {
        const RandomRegion region(random);
        Bytes memory = random_bytes(region.memory_bytes, random());
        const std::uint64_t offset = random_below(random, 50);
        const std::uint64_t size = offset + region.stream_bytes + random_below(random, 10);
        Bytes expected(size, std::byte{0});
        std::vector<bool> covered(size, false);
        region.each_byte([&](std::uint64_t stream, std::uint64_t at) {
            expected[offset + stream] = memory[at];
            covered[offset + stream] = true;
        });
        const auto bytes = static_cast<std::uint64_t>(std::ranges::count(covered, true));

        Transfer transfer;
        transfer.add_strided(offset, region.itemsize, region.axes, memory.data(), 7);
        const StreamContent content(transfer);
        check_equal(content.nbytes(), bytes);

        // Whole, and in pieces cut anywhere: what is gathered, what is counted, what is touched.
        Bytes gathered(size, std::byte{0xEE});
        std::uint64_t counted = 0;
        for (std::uint64_t at = 0; at < size;) {
            const std::uint64_t length = std::min(size - at, 1 + random_below(random, 100));
            const Range part{.begin = at, .end = at + length};
            const auto filled = content.fill(part, gathered.data() + at);
            check_equal(filled.error, 0);
            for (const auto& group : filled.groups) {
                check_equal(group.group, 7);
                counted += group.nbytes;
            }
            const bool any = std::any_of(covered.begin() + static_cast<std::ptrdiff_t>(at),
                                         covered.begin() + static_cast<std::ptrdiff_t>(part.end),
                                         [](bool b) { return b; });
            check(content.touches(part) == any, "touches");
            at += length;
        }
        check(gathered == expected, "gathered");
        check_equal(counted, bytes);

        // Scattered back, in other pieces, into other memory.
        Bytes scattered(memory.size(), std::byte{0x55});
        Bytes wanted = scattered;
        region.each_byte([&](std::uint64_t, std::uint64_t at) { wanted[at] = memory[at]; });
        Transfer back;
        back.add_strided(offset, region.itemsize, region.axes, scattered.data(), 0);
        const StreamContent scatter(back);
        for (std::uint64_t at = 0; at < size;) {
            const std::uint64_t length = std::min(size - at, 1 + random_below(random, 100));
            scatter.copy(Direction::kScatter, {.begin = at, .end = at + length},
                         gathered.data() + at);
            at += length;
        }
        check(scattered == wanted, "scattered");
    }
}

void interlocked_boxes_are_not_overlaps() {
    // Columns 0..2 and 3..7 of an 8-column array of 4-byte items; then columns 2..7.
    Bytes left = random_bytes(100 * 3 * 4, 1);
    Bytes right = random_bytes(100 * 5 * 4, 2);
    const std::array left_axes{Axis{100, 32, 12}, Axis{3, 4, 4}};
    const std::array right_axes{Axis{100, 32, 20}, Axis{5, 4, 4}};
    Transfer transfer;
    transfer.add_strided(12, 4, right_axes, right.data(), 0);
    transfer.add_strided(0, 4, left_axes, left.data(), 1);
    const StreamContent content(transfer);
    Bytes stream(3200);
    for (const std::uint64_t cut : {0U, 1U, 31U, 1000U, 3200U}) {
        std::ranges::fill(stream, std::byte{9});
        static_cast<void>(content.fill({.begin = 0, .end = cut}, stream.data()));
        static_cast<void>(content.fill({.begin = cut, .end = 3200}, stream.data() + cut));
        for (std::size_t row = 0; row < 100; ++row) {
            check(std::memcmp(&stream[row * 32], &left[row * 12], 12) == 0);
            check(std::memcmp(&stream[row * 32 + 12], &right[row * 20], 20) == 0);
        }
    }
    Transfer overlapping;
    overlapping.add_strided(8, 4, right_axes, right.data(), 0);
    overlapping.add_strided(0, 4, left_axes, left.data(), 1);
    check_throws<std::invalid_argument>("overlap",
                                        [&] { static_cast<void>(StreamContent(overlapping)); });
    Transfer between;
    between.add_strided(0, 4, left_axes, left.data(), 1);
    between.add(12, 20, right.data(), 0);
    static_cast<void>(StreamContent(between));
    between.add(50, 20, right.data(), 0);
    check_throws<std::invalid_argument>("overlap",
                                        [&] { static_cast<void>(StreamContent(between)); });
}

void bad_arguments_are_refused() {
    using Invalid = std::invalid_argument;
    Bytes memory(100);
    Transfer transfer;
    check_throws<Invalid>("2^63", [&] { transfer.add(~0ULL, 1, memory.data(), 0); });
    check_throws<Invalid>("2^63",
                          [&] { transfer.add(1ULL << 62U, 1ULL << 62U, memory.data(), 0); });
    check_throws<Invalid>("null", [&] { transfer.add(0, 1, nullptr, 0); });
    check_throws<Invalid>("group", [&] { transfer.add(0, 1, memory.data(), -2); });
    transfer.add(0, 0, nullptr, 0);
    const std::array overlapping{Axis{4, 4, 4}, Axis{2, 4, 4}};
    check_throws<Invalid>("row-major",
                          [&] { transfer.add_strided(0, 4, overlapping, memory.data(), 0); });
    const std::array broadcast{Axis{4, 0, 4}};
    check_throws<Invalid>("row-major",
                          [&] { transfer.add_strided(0, 4, broadcast, memory.data(), 0); });
    const std::array huge{Axis{1ULL << 40U, 1ULL << 40U, 1}};
    check_throws<Invalid>("2^63", [&] { transfer.add_strided(0, 4, huge, memory.data(), 0); });
    check_throws<Invalid>("itemsize", [&] { transfer.add_strided(0, 0, {}, memory.data(), 0); });
    transfer.add(0, 10, memory.data(), 0);
    transfer.add(9, 10, memory.data(), 0);
    check_throws<Invalid>("[0, 10) and [9, 19) overlap",
                          [&] { static_cast<void>(StreamContent(transfer)); });
}

void large_gathers_use_threads_and_match() {
    Source source(40 * kMiB, 3 * kMiB, 3);
    Bytes out(source.stream.size(), std::byte{0});
    gather(StreamContent(source.transfer), out.data());
    check(out == source.stream);
    // A transposed matrix, larger than what one thread copies.
    constexpr std::uint64_t kSide = 2048;
    Bytes matrix = random_bytes(kSide * kSide * 4, 4);
    const std::array axes{Axis{kSide, kSide * 4, 4}, Axis{kSide, 4, kSide * 4}};
    Transfer transfer;
    transfer.add_strided(0, 4, axes, matrix.data(), 0);
    Bytes transposed(matrix.size());
    gather(StreamContent(transfer), transposed.data());
    for (std::uint64_t r = 0; r < kSide; r += 7) {
        for (std::uint64_t c = 0; c < kSide; ++c) {
            check(std::memcmp(&transposed[(r * kSide + c) * 4], &matrix[(c * kSide + r) * 4], 4) ==
                  0);
        }
    }
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<random_boxes_match_brute_force, interlocked_boxes_are_not_overlaps,
                     bad_arguments_are_refused, large_gathers_use_threads_and_match>();
}
