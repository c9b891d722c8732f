// CRC32C by the CPU's own instruction. Compiled for CPUs that have it: check before calling.

#pragma once

#include <cstddef>
#include <cstdint>

namespace datastates {

/// The register after `size` bytes, starting from register `state` (neither is inverted).
/// Must be called only if `has_crc32c_hardware` and the CPU has the instruction.
std::uint32_t crc32c_hardware(std::uint32_t state, const std::byte* data, std::size_t size);

/// Whether this build has such code.
extern const bool has_crc32c_hardware;

}  // namespace datastates
