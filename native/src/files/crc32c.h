// CRC32C (Castagnoli; RFC 3720, appendix B.4), the checksum of every stored block.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace datastates {

/// CRC32C of `data`, continuing from `crc`, by the fastest means of this CPU.
std::uint32_t crc32c(std::span<const std::byte> data, std::uint32_t crc = 0);

/// The same by tables alone (slicing by 8), whatever the CPU has.
std::uint32_t crc32c_portable(std::span<const std::byte> data, std::uint32_t crc = 0);

}  // namespace datastates
