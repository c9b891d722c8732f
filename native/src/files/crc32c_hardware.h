// CRC32C by the CPU's own instruction. Compiled for CPUs that have it: check before calling.

#pragma once

#include <cstddef>
#include <cstdint>

namespace datastates {

/// The register after `size` bytes, starting from register `state` (neither is inverted).
/// Must be called only if `crc32c_hardware_name` is not null and the CPU has the instruction.
std::uint32_t crc32c_hardware(std::uint32_t state, const std::byte* data, std::size_t size);

/// "sse4.2", "armv8", or null where this build has no such code.
extern const char* const crc32c_hardware_name;

}  // namespace datastates
