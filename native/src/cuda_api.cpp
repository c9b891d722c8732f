#include "cuda_api.h"
namespace datastates {
std::string cuda_library() {
    return "libcuda.so.1";
}
MaybeFault open_cuda(const std::string& library, std::shared_ptr<DeviceApi>&) {
    return Fault{
        .kind = FaultKind::kDevice, .path = library, .operation = "dlopen", .detail = "stub"};
}
}  // namespace datastates
