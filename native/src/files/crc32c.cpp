#include "files/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#include "files/crc32c_hardware.h"
#include "files/crc32c_polynomial.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace datastates {
namespace {

/// Row k advances a byte by k more bytes of zeros.
using SliceTables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr SliceTables make_slices() {
    SliceTables tables{};
    for (std::size_t value = 0; value < 256; ++value) {
        auto state = after_zero_byte(static_cast<std::uint32_t>(value));
        for (auto& row : tables) {
            row.at(value) = state;
            state = after_zero_byte(state);
        }
    }
    return tables;
}

constexpr SliceTables kSlices = make_slices();

bool cpu_has_instruction() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2") != 0;  // NOLINT(*-implicit-bool-conversion): GCC: int
#elif defined(__aarch64__)
    constexpr unsigned long kHwcapCrc32 = 1UL << 7U;  // HWCAP_CRC32 of <asm/hwcap.h>
    return (getauxval(AT_HWCAP) & kHwcapCrc32) != 0;
#else
    return false;
#endif
}

bool use_hardware() {
    static const bool use = has_crc32c_hardware && cpu_has_instruction();
    return use;
}

}  // namespace

std::uint32_t crc32c(std::span<const std::byte> data, std::uint32_t crc) {
    if (!use_hardware()) return crc32c_portable(data, crc);
    return ~crc32c_hardware(~crc, data.data(), data.size());
}

std::uint32_t crc32c_portable(std::span<const std::byte> data, std::uint32_t crc) {
    static_assert(std::endian::native == std::endian::little);
    std::uint32_t state = ~crc;
    const std::byte* next = data.data();
    std::size_t left = data.size();
    for (; left >= 8; left -= 8, next += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, next, sizeof word);
        word ^= state;
        state = kSlices[7][word & 0xFFU] ^ kSlices[6][(word >> 8U) & 0xFFU] ^
                kSlices[5][(word >> 16U) & 0xFFU] ^ kSlices[4][(word >> 24U) & 0xFFU] ^
                kSlices[3][(word >> 32U) & 0xFFU] ^ kSlices[2][(word >> 40U) & 0xFFU] ^
                kSlices[1][(word >> 48U) & 0xFFU] ^ kSlices[0][word >> 56U];
    }
    for (; left > 0; --left, ++next) {
        state = (state >> 8U) ^ kSlices[0][(state ^ std::to_integer<std::uint32_t>(*next)) & 0xFFU];
    }
    return ~state;
}

}  // namespace datastates
