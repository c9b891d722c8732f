// What an old driver does not have: batches of copies, and functions by the version of their ABI.

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "calls.h"
#include "driver.h"

namespace datastates::cuda {
namespace {

using fake_cuda::Caller;
using fake_cuda::DeviceCopy;
using fake_cuda::Driver;
using fake_cuda::Needs;

/// What becomes of a batch, by the hostility of that name.
constexpr std::uint64_t kHalf = 1;
constexpr std::uint64_t kCrash = 2;
constexpr std::uint64_t kHang = 3;

struct Batch {
    const DevicePointer* to;
    const DevicePointer* from;
    const std::size_t* nbytes;
    std::size_t count;
    const CopyAttributes* attributes;
    const std::size_t* firsts;
    std::size_t attributes_count;
};

bool is_valid(const Batch& batch) {
    if (batch.count == 0 || batch.attributes_count == 0 || batch.attributes_count > batch.count ||
        batch.firsts[0] != 0) {
        return false;
    }
    for (std::size_t n = 0; n < batch.attributes_count; ++n) {
        const int order = batch.attributes[n].source_access_order;
        if (order < 1 || order > 3) return false;
        if (n > 0 && batch.firsts[n] <= batch.firsts[n - 1]) return false;
    }
    return true;
}

Result enqueue_batch(Driver& driver, Caller& caller, const Batch& batch, std::size_t& failed,
                     Stream stream) {
    if (stream <= 1 || !is_valid(batch)) return kInvalidValue;
    fake_cuda::Stream* const of = driver.streams.stream(caller.device, stream);
    if (of != nullptr && of->capture) {  // there is no such node in a graph
        of->capture->invalidated = true;
        return kCaptureUnsupported;
    }
    std::vector<DeviceCopy> copies;
    for (std::size_t n = 0; n < batch.count; ++n) {
        if (batch.nbytes[n] == 0) {
            failed = n;
            return kInvalidValue;
        }
        std::byte* const to = fake_cuda::bytes_at(batch.to[n]);
        const std::byte* const from = fake_cuda::bytes_at(batch.from[n]);
        const auto source = fake_cuda::addresses_of(from, batch.nbytes[n]);
        copies.push_back({.to_host = driver.memory.is_of_device(caller.device, source),
                          .bytes = {.to = to, .from = from, .nbytes = batch.nbytes[n]}});
    }
    const auto behind = driver.hostility.batch;
    if (behind == kHalf) copies.resize(copies.size() / 2);
    const Result result = driver.enqueue_copies(caller, stream, copies, failed);
    if (result == kSuccess) ++driver.counts.batches;
    if (result != kSuccess || behind == 0) return result;
    if (behind == kHalf) return kInvalidValue;
    const auto end = std::make_shared<fake_cuda::Work>();
    end->engines = true;
    if (behind == kCrash) {
        end->kernel = [] {
            Driver::instance().arrange([](Driver& all) {
                all.poison = kIllegalAddress;
                all.scheduler.drop_all();
            });
        };
    }
    const auto never = behind == kHang ? std::make_shared<fake_cuda::Work>() : nullptr;
    return driver.streams.enqueue(*of, end, never);
}

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
    static const std::array<Entry, 28> kFunctions{{
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
        {"cuMemHostGetDevicePointer", 3020, address_of(cuMemHostGetDevicePointer_v2)},
        {"cuMemcpyDtoHAsync", 3020, address_of(cuMemcpyDtoHAsync_v2)},
        {"cuMemcpyHtoDAsync", 3020, address_of(cuMemcpyHtoDAsync_v2)},
        {"cuMemcpyBatchAsync", 12080, address_of(cuMemcpyBatchAsync)},
        {"cuMemcpyBatchAsync", 13000, address_of(cuMemcpyBatchAsync_v2)},
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

Result cuMemcpyBatchAsync(const DevicePointer* to, const DevicePointer* from,
                          const std::size_t* nbytes, std::size_t count,
                          const CopyAttributes* attributes, const std::size_t* firsts,
                          std::size_t attributes_count, std::size_t* failed, Stream stream) {
    const Batch batch{to, from, nbytes, count, attributes, firsts, attributes_count};
    return Driver::instance().call("cuMemcpyBatchAsync", Needs::kContext,
                                   [&](Driver& driver, Caller& caller) {
                                       *failed = SIZE_MAX;
                                       return enqueue_batch(driver, caller, batch, *failed, stream);
                                   });
}

Result cuMemcpyBatchAsync_v2(const DevicePointer* to, const DevicePointer* from,
                             const std::size_t* nbytes, std::size_t count,
                             const CopyAttributes* attributes, const std::size_t* firsts,
                             std::size_t attributes_count, Stream stream) {
    const Batch batch{to, from, nbytes, count, attributes, firsts, attributes_count};
    return Driver::instance().call("cuMemcpyBatchAsync_v2", Needs::kContext,
                                   [&](Driver& driver, Caller& caller) {
                                       std::size_t failed = 0;
                                       return enqueue_batch(driver, caller, batch, failed, stream);
                                   });
}

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
