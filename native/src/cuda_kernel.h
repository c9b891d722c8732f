// The one kernel that this project has for CUDA devices: it copies a list of small pieces of
// memory. Its code is PTX, which every driver compiles for the device at hand.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "cuda_abi.h"

namespace datastates::cuda {

inline constexpr std::size_t kListed = 192;

/// The kernel's only parameter; drivers take up to 4096 bytes. Block (i, j) copies every
/// gridDim.y-th part of piece i, from the j-th on.
struct PieceList {
    std::array<DevicePointer, kListed> to{};
    std::array<DevicePointer, kListed> from{};
    std::array<std::uint32_t, kListed> nbytes{};
};
static_assert(sizeof(PieceList) == 3840);

inline constexpr unsigned kThreadsPerBlock = 256;
inline constexpr unsigned kWidest = 16;  ///< bytes that a thread copies at once

inline constexpr const char* kKernelName = "dcp_datastates_copy";
extern const char* const kKernelPtx;

}  // namespace datastates::cuda
