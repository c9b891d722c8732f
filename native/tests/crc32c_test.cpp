#include "files/crc32c.h"

#include <span>
#include <vector>

#include "check.h"
#include "support.h"

namespace datastates::testing {
namespace {

std::uint32_t bitwise(std::span<const std::byte> data) {
    std::uint32_t state = 0xFFFFFFFFU;
    for (const std::byte byte : data) {
        state ^= std::to_integer<std::uint32_t>(byte);
        for (int bit = 0; bit < 8; ++bit) {
            state = (state >> 1U) ^ ((state & 1U) != 0 ? 0x82F63B78U : 0U);
        }
    }
    return ~state;
}

void known_vectors() {
    // RFC 3720, appendix B.4, and the check value of the catalogue of CRCs.
    Bytes ascending;
    for (unsigned i = 0; i < 32; ++i) ascending.push_back(static_cast<std::byte>(i));
    const Bytes descending(ascending.rbegin(), ascending.rend());
    const std::string_view digits = "123456789";
    for (const auto compute : {&crc32c, &crc32c_portable}) {
        check_equal(compute(Bytes(32, std::byte{0}), 0), 0x8A9136AAU);
        check_equal(compute(Bytes(32, std::byte{0xFF}), 0), 0x62A8AB43U);
        check_equal(compute(ascending, 0), 0x46DD794EU);
        check_equal(compute(descending, 0), 0x113FDB5CU);
        check_equal(compute(std::as_bytes(std::span(digits)), 0), 0xE3069283U);
        check_equal(compute({}, 0), 0U);
    }
}

void implementations_agree_at_all_lengths_and_alignments() {
    const Bytes data = random_bytes(1100, 1);
    for (std::size_t size = 0; size <= 1024; ++size) {
        const auto part = std::span(data).subspan(size % 16, size);
        const std::uint32_t expected = bitwise(part);
        check_equal(crc32c(part), expected);
        check_equal(crc32c_portable(part), expected);
    }
    const Bytes large = random_bytes(kMiB + 100, 2);
    Random random(3);
    for (int i = 0; i < 200; ++i) {
        const std::size_t begin = random_below(random, 64);
        const std::size_t size = random_below(random, large.size() - begin);
        const auto part = std::span(large).subspan(begin, size);
        check_equal(crc32c(part), crc32c_portable(part));
    }
}

void a_sum_continues() {
    const Bytes data = random_bytes(100'000, 4);
    const std::span all(data);
    for (const std::size_t cut : {0U, 1U, 7U, 768U, 24'576U, 99'999U, 100'000U}) {
        check_equal(crc32c(all.subspan(cut), crc32c(all.first(cut))), crc32c(all));
        check_equal(crc32c_portable(all.subspan(cut), crc32c_portable(all.first(cut))),
                    crc32c(all));
    }
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<known_vectors, implementations_agree_at_all_lengths_and_alignments,
                     a_sum_continues>();
}
