// What the fake driver exports under the names of CUDA's. See the documentation of those.

#pragma once

#include <cstddef>
#include <cstdint>

#include "device/cuda_abi.h"

#pragma GCC visibility push(default)
extern "C" {

namespace datastates::cuda {

Result cuInit(unsigned flags);
Result cuGetErrorName(Result error, const char** name);
Result cuGetErrorString(Result error, const char** words);
Result cuDriverGetVersion(int* version);
Result cuDeviceGetCount(int* count);
Result cuDeviceGet(Device* device, int ordinal);
Result cuDeviceGetAttribute(int* value, int attribute, Device device);

Result cuDevicePrimaryCtxRetain(Context* context, Device device);
Result cuDevicePrimaryCtxRelease_v2(Device device);
Result cuCtxPushCurrent_v2(Context context);
Result cuCtxPopCurrent_v2(Context* context);

Result cuStreamCreate(Stream* stream, unsigned flags);
Result cuStreamDestroy_v2(Stream stream);
Result cuStreamWaitEvent(Stream stream, Event event, unsigned flags);
Result cuThreadExchangeStreamCaptureMode(CaptureMode* mode);

Result cuEventCreate(Event* event, unsigned flags);
Result cuEventDestroy_v2(Event event);
Result cuEventRecord(Event event, Stream stream);
Result cuEventQuery(Event event);

Result cuMemHostRegister_v2(void* data, std::size_t nbytes, unsigned flags);
Result cuMemHostUnregister(void* data);
Result cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, std::size_t nbytes, Stream stream);
Result cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, std::size_t nbytes, Stream stream);

// Not in an old driver.

Result cuGetProcAddress(const char* symbol, void** function, int version, std::uint64_t flags);
Result cuGetProcAddress_v2(const char* symbol, void** function, int version, std::uint64_t flags,
                           int* status);

}  // namespace datastates::cuda

}  // extern "C"
#pragma GCC visibility pop
