// Modules and the kernels in them, by their handles. Guarded by the driver's mutex.

#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "cuda_abi.h"
#include "ptx.h"
#include "streams.h"

namespace datastates::fake_cuda {

struct Function {
    int device = 0;
    std::shared_ptr<const Kernel> kernel;
};

class Modules {
  public:
    Handle load(int device, std::string ptx);
    /// Fails if the module has no kernel of that name, or one that is not known here.
    cuda::Result find(int device, Handle module, std::string_view name, Handle& function);
    /// Null if there is none.
    [[nodiscard]] const Function* function(Handle handle) const;
    /// Of a context that ends.
    void unload_all(int device);

  private:
    struct Module {
        int device = 0;
        std::string ptx;
    };

    Handle next_handle_ = 0x80000000;  // no stream's nor event's
    std::map<Handle, Module> modules_;
    std::map<Handle, Function> functions_;
};

}  // namespace datastates::fake_cuda
