#include "device/cuda_table.h"

#include <dlfcn.h>

#include <cstdint>
#include <string_view>
#include <utility>

namespace datastates::cuda {
namespace {

using GetProcAddressV2 = Result (*)(const char*, void**, int, std::uint64_t, int*);
using GetProcAddress = Result (*)(const char*, void**, int, std::uint64_t);

/// Finds functions, and keeps the names of those that are missing.
class Finder {
  public:
    explicit Finder(void* library)
        : library_(library),
          get_v2_(reinterpret_cast<GetProcAddressV2>(dlsym(library, "cuGetProcAddress_v2"))),
          get_(reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress"))) {}

    template <typename... Arguments>
    void find(Call<Arguments...>& call) {
        call.function = reinterpret_cast<decltype(call.function)>(address(call.name, call.version));
        if (call.function == nullptr) {
            missing_ += (missing_.empty() ? "" : ", ") + std::string(call.name);
        }
    }

    [[nodiscard]] const std::string& missing() const { return missing_; }

  private:
    /// Drivers before 11.3 have no such function; of theirs, the exported name tells the ABI.
    [[nodiscard]] void* address(const char* exported, int version) const {
        if (get_v2_ == nullptr && get_ == nullptr) return dlsym(library_, exported);
        std::string_view name = exported;
        if (name.ends_with("_v2")) name.remove_suffix(3);  // the version says so
        const std::string symbol(name);
        void* found = nullptr;
        const Result result = get_v2_ != nullptr
                                  ? get_v2_(symbol.c_str(), &found, version, kLegacyStream, nullptr)
                                  : get_(symbol.c_str(), &found, version, kLegacyStream);
        return result == kSuccess ? found : nullptr;
    }

    void* library_;
    GetProcAddressV2 get_v2_;
    GetProcAddress get_;
    std::string missing_;
};

Fault fault_of_loading(std::string operation, std::string detail) {
    Fault fault;
    fault.kind = FaultKind::kDevice;
    fault.operation = std::move(operation);
    fault.detail = std::move(detail);
    return fault;
}

}  // namespace

datastates::Result<Table> load(const std::string& library) {
    // Never closed: a driver has threads and handlers of its own.
    void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        const char* const words = dlerror();
        return fault_of_loading("dlopen", "cannot open '" + library + "': " +
                                              (words != nullptr ? words : "no reason is given"));
    }
    Table table;
    Finder finder(handle);
    finder.find(table.init);
    finder.find(table.error_name);
    finder.find(table.error_string);
    finder.find(table.driver_version);
    finder.find(table.device_count);
    finder.find(table.device_get);
    finder.find(table.device_attribute);
    finder.find(table.context_retain);
    finder.find(table.context_release);
    finder.find(table.context_push);
    finder.find(table.context_pop);
    finder.find(table.stream_create);
    finder.find(table.stream_destroy);
    finder.find(table.stream_wait);
    finder.find(table.exchange_capture_mode);
    finder.find(table.event_create);
    finder.find(table.event_destroy);
    finder.find(table.event_record);
    finder.find(table.event_query);
    finder.find(table.host_register);
    finder.find(table.host_unregister);
    finder.find(table.copy_to_host);
    finder.find(table.copy_to_device);
    if (finder.missing().empty()) return table;
    int version = 0;
    const bool versioned = table.driver_version.function != nullptr &&
                           table.driver_version.function(&version) == kSuccess;
    return fault_of_loading(
        "dlsym", "'" + library + "' " +
                     (versioned ? "drives only CUDA " + std::to_string(version / 1000) + "." +
                                      std::to_string(version % 1000 / 10)
                                : "is no CUDA driver") +
                     ": it has no " + finder.missing());
}

}  // namespace datastates::cuda
