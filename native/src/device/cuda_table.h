// The CUDA driver's functions, found in its library at run time: nothing here is linked to CUDA,
// and one build serves machines with and without it.

#pragma once

#include <cstddef>
#include <string>

#include "base/status.h"
#include "device/cuda_abi.h"

namespace datastates::cuda {

/// One function of the driver. `name` is the exported one, with the suffix of its ABI; `version` is
/// the CUDA version that introduced this ABI, which is how the driver is asked for it.
template <typename... Arguments>
struct Call {
    const char* name = nullptr;
    int version = 0;
    Result (*function)(Arguments...) = nullptr;
};

/// Those that are used. Copies are made one by one: drivers have crashed in `cuMemcpyBatchAsync`,
/// one of CUDA 13.0 after a device assert, so that the process died without the assert's message.
struct Table {
    Call<unsigned> init{"cuInit", 2000};
    Call<Result, const char**> error_name{"cuGetErrorName", 6000};
    Call<Result, const char**> error_string{"cuGetErrorString", 6000};
    Call<int*> driver_version{"cuDriverGetVersion", 2020};

    Call<int*> device_count{"cuDeviceGetCount", 2000};
    Call<Device*, int> device_get{"cuDeviceGet", 2000};
    Call<int*, int, Device> device_attribute{"cuDeviceGetAttribute", 2000};
    Call<Context*, Device> context_retain{"cuDevicePrimaryCtxRetain", 7000};
    Call<Device> context_release{"cuDevicePrimaryCtxRelease_v2", 11000};
    Call<Context> context_push{"cuCtxPushCurrent_v2", 4000};
    Call<Context*> context_pop{"cuCtxPopCurrent_v2", 4000};

    Call<Stream*, unsigned> stream_create{"cuStreamCreate", 2000};
    Call<Stream> stream_destroy{"cuStreamDestroy_v2", 4000};
    Call<Stream, Event, unsigned> stream_wait{"cuStreamWaitEvent", 3020};
    Call<CaptureMode*> exchange_capture_mode{"cuThreadExchangeStreamCaptureMode", 10010};

    Call<Event*, unsigned> event_create{"cuEventCreate", 2000};
    Call<Event> event_destroy{"cuEventDestroy_v2", 4000};
    Call<Event, Stream> event_record{"cuEventRecord", 2000};
    Call<Event> event_query{"cuEventQuery", 2000};

    Call<void*, std::size_t, unsigned> host_register{"cuMemHostRegister_v2", 6050};
    Call<void*> host_unregister{"cuMemHostUnregister", 4000};
    Call<void*, DevicePointer, std::size_t, Stream> copy_to_host{"cuMemcpyDtoHAsync_v2", 3020};
    Call<DevicePointer, const void*, std::size_t, Stream> copy_to_device{"cuMemcpyHtoDAsync_v2",
                                                                         3020};
};

/// Opens `library` for good, and finds the functions in it. The fault names the library, and what
/// the loader says or which functions are missing.
datastates::Result<Table> load(const std::string& library);

}  // namespace datastates::cuda
