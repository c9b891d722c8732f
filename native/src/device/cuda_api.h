// CUDA, as a DeviceApi: through the driver's library, opened at run time.

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "device/device_api.h"

namespace datastates {

/// The library that the environment variable DCP_DATASTATES_CUDA_LIBRARY names, or libcuda.so.1.
std::string cuda_library();

/// Whether copies are given to the driver in batches, where it has a call for them.
enum class CopyBatches : std::uint8_t {
    kWhereKnown,  ///< to devices on which the call is known to work
    kNever,
    kAlways,
};

/// What DCP_DATASTATES_CUDA_BATCH says: 0 never, 1 always; whatever else: where it is known to
/// work.
CopyBatches cuda_batches();

/// Opens a driver, without initializing it. Any thread. The fault says what `library` lacks.
Result<std::shared_ptr<DeviceApi>> open_cuda(const std::string& library,
                                             CopyBatches batches = cuda_batches());

}  // namespace datastates
