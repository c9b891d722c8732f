#include "calls.h"

#include <array>
#include <span>

#include "driver.h"

namespace datastates::cuda {
namespace {

using fake_cuda::Caller;
using fake_cuda::DeviceCopy;
using fake_cuda::Driver;
using fake_cuda::Handle;
using fake_cuda::Needs;

template <typename Body>
Result call(const char* symbol, Needs needs, const Body& body) {
    return Driver::instance().call(symbol, needs, body);
}

struct ErrorText {
    Result code;
    const char* name;
    const char* words;
};

constexpr std::array<ErrorText, 25> kErrors{{
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kDeinitialized, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {kContextIsDestroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {kHostMemoryAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {kHostMemoryNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {kCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {kCaptureMerge, "CUDA_ERROR_STREAM_CAPTURE_MERGE",
     "operation would result in a merge of separate capture sequences"},
    {kCaptureUnjoined, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {kCaptureIsolation, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {kCaptureImplicit, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {kCapturedEvent, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {kUnknown, "CUDA_ERROR_UNKNOWN", "unknown error"},
}};

Result find_text(Result error, const char* ErrorText::* text, const char** found) {
    *found = nullptr;
    for (const ErrorText& each : kErrors) {
        if (each.code == error) *found = each.*text;
    }
    return *found != nullptr ? kSuccess : kInvalidValue;
}

}  // namespace

Result cuInit(unsigned flags) {
    return call("cuInit", Needs::kNothing, [&](Driver& driver, Caller&) -> Result {
        if (driver.poison != kSuccess) return driver.poison;
        if (flags != 0) return kInvalidValue;
        if (driver.devices == 0) return kNoDevice;
        driver.initialized = true;
        return kSuccess;
    });
}

Result cuGetErrorName(Result error, const char** name) {
    return call("cuGetErrorName", Needs::kNothing,
                [&](Driver&, Caller&) { return find_text(error, &ErrorText::name, name); });
}

Result cuGetErrorString(Result error, const char** words) {
    return call("cuGetErrorString", Needs::kNothing,
                [&](Driver&, Caller&) { return find_text(error, &ErrorText::words, words); });
}

Result cuDriverGetVersion(int* version) {
    return call("cuDriverGetVersion", Needs::kNothing, [&](Driver& driver, Caller&) {
        *version = driver.version;
        return kSuccess;
    });
}

Result cuDeviceGetCount(int* count) {
    return call("cuDeviceGetCount", Needs::kInitialized, [&](Driver& driver, Caller&) {
        *count = driver.devices;
        return kSuccess;
    });
}

Result cuDeviceGet(Device* device, int ordinal) {
    return call("cuDeviceGet", Needs::kInitialized, [&](Driver& driver, Caller&) {
        if (ordinal < 0 || ordinal >= driver.devices) return kInvalidDevice;
        *device = ordinal;
        return kSuccess;
    });
}

Result cuDeviceGetAttribute(int* value, int attribute, Device device) {
    return call("cuDeviceGetAttribute", Needs::kInitialized, [&](Driver& driver, Caller&) {
        if (device < 0 || device >= driver.devices) return kInvalidDevice;
        const auto found = driver.attributes.find(attribute);
        if (found == driver.attributes.end()) return kInvalidValue;
        *value = found->second;
        return kSuccess;
    });
}

Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
    return call("cuDevicePrimaryCtxRetain", Needs::kInitialized, [&](Driver& driver, Caller&) {
        if (device < 0 || device >= driver.devices) return kInvalidDevice;
        const auto& primary = driver.streams.context(device);
        if (primary.references == 0) {  // memory will be allocated for it
            const Result unsafe = driver.streams.check_unsafe(driver.this_thread().capture_mode);
            if (unsafe != kSuccess) return unsafe;
        }
        driver.streams.retain(device);
        *context = primary.handle;
        return kSuccess;
    });
}

Result cuDevicePrimaryCtxRelease_v2(Device device) {
    Driver& all = Driver::instance();
    if (all.arrange([device](Driver& driver) { return driver.streams.release_late(device); })) {
        return kSuccess;
    }
    const Result released = call("cuDevicePrimaryCtxRelease_v2", Needs::kInitialized,
                                 [&](Driver& driver, Caller& caller) {
                                     if (device < 0 || device >= driver.devices)
                                         return kInvalidDevice;
                                     if (driver.streams.context(device).references == 1)
                                         driver.drain(caller, device);
                                     bool ended = false;
                                     const Result result = driver.streams.release(device, ended);
                                     if (ended) driver.memory.unregister_all(device);
                                     return result;
                                 });
    if (released != kSuccess) {
        all.arrange([device](Driver& driver) { driver.streams.refuse_release(device); });
    }
    return released;
}

Result cuCtxPushCurrent_v2(Context context) {
    return call("cuCtxPushCurrent_v2", Needs::kInitialized, [&](Driver& driver, Caller&) {
        int device = 0;
        const Result result = driver.streams.device_of(context, device);
        if (result == kSuccess) driver.this_thread().contexts.push_back(context);
        return result;
    });
}

Result cuCtxPopCurrent_v2(Context* context) {
    return call("cuCtxPopCurrent_v2", Needs::kInitialized, [&](Driver& driver, Caller&) {
        auto& contexts = driver.this_thread().contexts;
        if (contexts.empty()) return kInvalidContext;
        *context = contexts.back();
        contexts.pop_back();
        return kSuccess;
    });
}

Result cuStreamCreate(Stream* stream, unsigned flags) {
    return call("cuStreamCreate", Needs::kContext, [&](Driver& driver, Caller& caller) {
        if (flags > kStreamNonBlocking) return kInvalidValue;
        const bool blocking = flags != kStreamNonBlocking;
        *stream = driver.streams.add_stream(caller.device, blocking, true);
        return kSuccess;
    });
}

Result cuStreamDestroy_v2(Stream stream) {
    return call("cuStreamDestroy_v2", Needs::kContext, [&](Driver& driver, Caller& caller) {
        const Handle handle = stream;
        if (handle <= 1 || driver.streams.stream(caller.device, handle) == nullptr) {
            return kInvalidHandle;
        }
        driver.streams.remove_stream(handle);  // its work goes on
        return kSuccess;
    });
}

Result cuStreamWaitEvent(Stream stream, Event event, unsigned flags) {
    return call("cuStreamWaitEvent", Needs::kContext, [&](Driver& driver, Caller& caller) {
        driver.await_room(caller, caller.device, 1);
        fake_cuda::Stream* const waits = driver.streams.stream(caller.device, stream);
        const fake_cuda::Event* const awaited = driver.streams.event(event);
        if (waits == nullptr || awaited == nullptr) return kInvalidHandle;
        if (waits->device != caller.device) return kInvalidContext;
        if (flags != 0) return kInvalidValue;
        return driver.streams.wait(*waits, *awaited, true);
    });
}

Result cuThreadExchangeStreamCaptureMode(CaptureMode* mode) {
    return call("cuThreadExchangeStreamCaptureMode", Needs::kInitialized,
                [&](Driver& driver, Caller&) {
                    auto& thread = driver.this_thread();
                    if (driver.hostility.context && thread.contexts.empty()) return kInvalidContext;
                    if (*mode < kCaptureGlobal || *mode > kCaptureRelaxed) return kInvalidValue;
                    std::swap(*mode, thread.capture_mode);
                    return kSuccess;
                });
}

Result cuEventCreate(Event* event, unsigned /*flags*/) {
    return call("cuEventCreate", Needs::kContext, [&](Driver& driver, Caller& caller) {
        *event = driver.streams.add_event(caller.device);
        return kSuccess;
    });
}

Result cuEventDestroy_v2(Event event) {
    return call("cuEventDestroy_v2", Needs::kContext, [&](Driver& driver, Caller&) {
        return driver.streams.remove_event(event) ? kSuccess : kInvalidHandle;
    });
}

Result cuEventRecord(Event event, Stream stream) {
    return call("cuEventRecord", Needs::kContext, [&](Driver& driver, Caller& caller) {
        driver.await_room(caller, caller.device, 1);
        fake_cuda::Event* const recorded = driver.streams.event(event);
        fake_cuda::Stream* const of = driver.streams.stream(caller.device, stream);
        if (recorded == nullptr || of == nullptr) return kInvalidHandle;
        if (of->device != caller.device) return kInvalidContext;
        if (recorded->device != of->device || of->foreign) return kInvalidHandle;
        return driver.streams.record(*recorded, *of, true);
    });
}

Result cuEventQuery(Event event) {
    return call("cuEventQuery", Needs::kContext, [&](Driver& driver, Caller&) {
        const fake_cuda::Event* const asked = driver.streams.event(event);
        if (asked == nullptr) return kInvalidHandle;
        const Result unsafe = driver.streams.check_unsafe(driver.this_thread().capture_mode);
        if (unsafe != kSuccess) return unsafe;
        if (asked->capture) return kCapturedEvent;
        if (asked->recorded == nullptr) return kSuccess;
        const bool told =
            asked->recorded->done &&
            fake_cuda::Clock::now() >= asked->recorded->done_at + driver.hostility.lie;
        return told ? kSuccess : kNotReady;
    });
}

Result cuMemHostRegister_v2(void* data, std::size_t nbytes, unsigned flags) {
    return call("cuMemHostRegister_v2", Needs::kContext, [&](Driver& driver, Caller& caller) {
        const Result unsafe = driver.streams.check_unsafe(driver.this_thread().capture_mode);
        if (unsafe != kSuccess) return unsafe;
        return driver.register_host(caller, fake_cuda::addresses_of(data, nbytes),
                                    (flags & kHostRegisterPortable) != 0);
    });
}

Result cuMemHostUnregister(void* data) {
    return call("cuMemHostUnregister", Needs::kContext, [&](Driver& driver, Caller& caller) {
        const Result unsafe = driver.streams.check_unsafe(driver.this_thread().capture_mode);
        if (unsafe != kSuccess) return unsafe;
        const auto gone = driver.memory.unregister_host(fake_cuda::addresses_of(data, 0).begin);
        if (gone == nullptr) return kHostMemoryNotRegistered;
        if (gone->uses > 0) ++driver.counts.early_unregistrations;
        driver.drain(caller, caller.device);
        return kSuccess;
    });
}

Result cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, std::size_t nbytes, Stream stream) {
    return call("cuMemcpyDtoHAsync_v2", Needs::kContext, [&](Driver& driver, Caller& caller) {
        const DeviceCopy copy{.to_host = true,
                              .bytes = {.to = static_cast<std::byte*>(to),
                                        .from = fake_cuda::bytes_at(from),
                                        .nbytes = nbytes}};
        return driver.enqueue_copy(caller, stream, copy);
    });
}

Result cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, std::size_t nbytes, Stream stream) {
    return call("cuMemcpyHtoDAsync_v2", Needs::kContext, [&](Driver& driver, Caller& caller) {
        const DeviceCopy copy{.to_host = false,
                              .bytes = {.to = fake_cuda::bytes_at(to),
                                        .from = static_cast<const std::byte*>(from),
                                        .nbytes = nbytes}};
        return driver.enqueue_copy(caller, stream, copy);
    });
}

}  // namespace datastates::cuda
