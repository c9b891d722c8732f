#pragma once
#include <memory>
#include <string>

#include "device_api.h"
namespace datastates {
std::string cuda_library();
MaybeFault open_cuda(const std::string& library, std::shared_ptr<DeviceApi>& api);
}  // namespace datastates
