// Arithmetic on CRC32C registers, as polynomials over GF(2) in reflected bit order.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace datastates {

/// The Castagnoli polynomial, reflected.
inline constexpr std::uint32_t kCrc32cPolynomial = 0x82F63B78U;

/// A linear map on registers, tabulated for each byte of its argument.
using RegisterMap = std::array<std::array<std::uint32_t, 256>, 4>;

/// The register after one more byte of zeros.
constexpr std::uint32_t after_zero_byte(std::uint32_t state) {
    for (int bit = 0; bit < 8; ++bit) {
        state = (state >> 1U) ^ ((state & 1U) != 0 ? kCrc32cPolynomial : 0U);
    }
    return state;
}

constexpr std::uint32_t apply(const RegisterMap& map, std::uint32_t state) {
    return map[0][state & 0xFFU] ^ map[1][(state >> 8U) & 0xFFU] ^ map[2][(state >> 16U) & 0xFFU] ^
           map[3][state >> 24U];
}

/// The map "append 2^log2 bytes of zeros", by repeated squaring (M. Adler's crc32_combine).
constexpr RegisterMap zeros_map(int log2) {
    std::array<std::uint32_t, 32> columns{};  // the image of each bit
    for (std::size_t bit = 0; bit < 32; ++bit) columns.at(bit) = after_zero_byte(1U << bit);
    for (int squaring = 0; squaring < log2; ++squaring) {
        std::array<std::uint32_t, 32> squared{};
        for (std::size_t bit = 0; bit < 32; ++bit) {
            std::uint32_t image = 0;
            for (std::size_t i = 0; i < 32; ++i) {
                if (((columns.at(bit) >> i) & 1U) != 0) image ^= columns.at(i);
            }
            squared.at(bit) = image;
        }
        columns = squared;
    }
    RegisterMap map{};
    for (std::size_t byte = 0; byte < 4; ++byte) {
        for (std::size_t value = 0; value < 256; ++value) {
            std::uint32_t image = 0;
            for (std::size_t bit = 0; bit < 8; ++bit) {
                if (((value >> bit) & 1U) != 0) image ^= columns.at(8 * byte + bit);
            }
            map.at(byte).at(value) = image;
        }
    }
    return map;
}

}  // namespace datastates
