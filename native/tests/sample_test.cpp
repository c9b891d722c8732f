#include "memory/sample.h"

#include <array>
#include <span>
#include <vector>

#include "check.h"
#include "support.h"

namespace datastates::testing {
namespace {

using View = std::span<const std::byte>;

void the_same_places_are_read() {
    const Bytes data = random_bytes(1 << 16, 1);
    std::vector<View> regions;
    for (std::size_t i = 0; i < 100; ++i) regions.push_back(View(data).subspan(i * 37, i * 300));
    check(sample_words(regions, 5) == sample_words(regions, 5));
    check(sample_words(regions, 5) != sample_words(regions, 6));
    check_equal(sample_words(regions, 5)[0], 0U);
}

void small_regions_are_read_whole() {
    Bytes data = random_bytes(63, 2);
    for (std::size_t size = 1; size < 64; ++size) {
        const std::array regions{View(data).first(size)};
        const auto before = sample_words(regions, 1);
        for (std::size_t at = 0; at < size; ++at) {
            data[at] ^= std::byte{1};
            check(sample_words(regions, 1) != before);
            data[at] ^= std::byte{1};
        }
    }
}

void many_seeds_reach_every_byte() {
    Bytes data(64, std::byte{0});
    for (std::size_t at = 0; at < data.size(); ++at) {
        const std::array regions{View(data)};
        bool seen = false;
        for (std::uint64_t seed = 0; seed < 500 && !seen; ++seed) {
            const auto before = sample_words(regions, seed);
            data[at] = std::byte{1};
            seen = sample_words(regions, seed) != before;
            data[at] = std::byte{0};
        }
        check(seen);
    }
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<the_same_places_are_read, small_regions_are_read_whole,
                     many_seeds_reach_every_byte>();
}
