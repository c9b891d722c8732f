// CUDA, as a DeviceApi: through the driver's library, opened at run time.

#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "device/device_api.h"

namespace datastates {

/// The library that the environment variable DCP_DATASTATES_CUDA_LIBRARY names, or libcuda.so.1.
std::string cuda_library();

/// Opens a driver, without initializing it. Any thread. The fault says what `library` lacks.
Result<std::shared_ptr<DeviceApi>> open_cuda(const std::string& library);

}  // namespace datastates
