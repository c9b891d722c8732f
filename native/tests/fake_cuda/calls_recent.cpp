// What an old driver does not have: functions by the version of their ABI.

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

#include "calls.h"
#include "driver.h"

namespace datastates::cuda {
namespace {

using fake_cuda::Caller;
using fake_cuda::Driver;
using fake_cuda::Needs;

struct Entry {
    std::string_view symbol;  ///< without the suffix of its ABI
    int version;              ///< of CUDA, that has this ABI first
    void* address;
};

template <typename Signature>
void* address_of(Signature* function) {
    return reinterpret_cast<void*>(function);
}

const auto& functions() {
    static const std::array<Entry, 25> kFunctions{{
        {"cuInit", 2000, address_of(cuInit)},
        {"cuGetErrorName", 6000, address_of(cuGetErrorName)},
        {"cuGetErrorString", 6000, address_of(cuGetErrorString)},
        {"cuDriverGetVersion", 2020, address_of(cuDriverGetVersion)},
        {"cuGetProcAddress", 11030, address_of(cuGetProcAddress)},
        {"cuGetProcAddress", 12000, address_of(cuGetProcAddress_v2)},
        {"cuDeviceGetCount", 2000, address_of(cuDeviceGetCount)},
        {"cuDeviceGet", 2000, address_of(cuDeviceGet)},
        {"cuDeviceGetAttribute", 2000, address_of(cuDeviceGetAttribute)},
        {"cuDevicePrimaryCtxRetain", 7000, address_of(cuDevicePrimaryCtxRetain)},
        {"cuDevicePrimaryCtxRelease", 11000, address_of(cuDevicePrimaryCtxRelease_v2)},
        {"cuCtxPushCurrent", 4000, address_of(cuCtxPushCurrent_v2)},
        {"cuCtxPopCurrent", 4000, address_of(cuCtxPopCurrent_v2)},
        {"cuStreamCreate", 2000, address_of(cuStreamCreate)},
        {"cuStreamDestroy", 4000, address_of(cuStreamDestroy_v2)},
        {"cuStreamWaitEvent", 3020, address_of(cuStreamWaitEvent)},
        {"cuThreadExchangeStreamCaptureMode", 10010, address_of(cuThreadExchangeStreamCaptureMode)},
        {"cuEventCreate", 2000, address_of(cuEventCreate)},
        {"cuEventDestroy", 4000, address_of(cuEventDestroy_v2)},
        {"cuEventRecord", 2000, address_of(cuEventRecord)},
        {"cuEventQuery", 2000, address_of(cuEventQuery)},
        {"cuMemHostRegister", 6050, address_of(cuMemHostRegister_v2)},
        {"cuMemHostUnregister", 4000, address_of(cuMemHostUnregister)},
        {"cuMemcpyDtoHAsync", 3020, address_of(cuMemcpyDtoHAsync_v2)},
        {"cuMemcpyHtoDAsync", 3020, address_of(cuMemcpyHtoDAsync_v2)},
    }};
    return kFunctions;
}

/// The newest that `version` had.
Result find(const Driver& driver, std::string_view symbol, int version, void** function) {
    *function = nullptr;
    if (driver.hidden.contains(symbol)) return kNotFound;
    for (const Entry& each : functions()) {
        if (each.symbol != symbol || each.version > std::min(version, driver.version)) continue;
        *function = each.address;
    }
    return *function != nullptr ? kSuccess : kNotFound;
}

}  // namespace

Result cuGetProcAddress(const char* symbol, void** function, int version, std::uint64_t /*flags*/) {
    return Driver::instance().call(
        "cuGetProcAddress", Needs::kNothing,
        [&](Driver& driver, Caller&) { return find(driver, symbol, version, function); });
}

Result cuGetProcAddress_v2(const char* symbol, void** function, int version,
                           std::uint64_t /*flags*/, int* status) {
    return Driver::instance().call(
        "cuGetProcAddress_v2", Needs::kNothing, [&](Driver& driver, Caller&) {
            const Result result = find(driver, symbol, version, function);
            if (status != nullptr) *status = result == kSuccess ? 0 : 1;
            return result;
        });
}

}  // namespace datastates::cuda
