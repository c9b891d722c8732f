#include "modules.h"

#include <optional>
#include <utility>

namespace datastates::fake_cuda {

Handle Modules::load(int device, std::string ptx) {
    modules_.emplace(++next_handle_, Module{.device = device, .ptx = std::move(ptx)});
    return next_handle_;
}

cuda::Result Modules::find(int device, Handle module, std::string_view name, Handle& function) {
    const auto found = modules_.find(module);
    if (found == modules_.end() || found->second.device != device) return cuda::kInvalidHandle;
    std::string why;
    auto kernel = Kernel::parse(found->second.ptx, name, why);
    if (!kernel) return why.starts_with("no such kernel") ? cuda::kNotFound : cuda::kInvalidPtx;
    functions_.emplace(
        ++next_handle_,
        Function{.device = device, .kernel = std::make_shared<const Kernel>(*std::move(kernel))});
    function = next_handle_;
    return cuda::kSuccess;
}

const Function* Modules::function(Handle handle) const {
    const auto found = functions_.find(handle);
    return found == functions_.end() ? nullptr : &found->second;
}

void Modules::unload_all(int device) {
    std::erase_if(modules_, [device](const auto& each) { return each.second.device == device; });
    std::erase_if(functions_, [device](const auto& each) { return each.second.device == device; });
}

}  // namespace datastates::fake_cuda
