// What little of the CUDA driver's binary interface is used here: types, and the values that it
// fixes.

#pragma once

#include <cstdint>

namespace datastates::cuda {

using Result = int;
using Device = int;
using DevicePointer = unsigned long long;

// Pointers to what only the driver looks into. They are passed as numbers of that size are.
using Context = std::uintptr_t;
using Stream = std::uintptr_t;
using Event = std::uintptr_t;
static_assert(sizeof(std::uintptr_t) == sizeof(void*));

inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kDeinitialized = 4;
inline constexpr Result kNoDevice = 100;
inline constexpr Result kInvalidDevice = 101;
inline constexpr Result kInvalidContext = 201;
inline constexpr Result kInvalidHandle = 400;
inline constexpr Result kNotFound = 500;
inline constexpr Result kNotReady = 600;
inline constexpr Result kIllegalAddress = 700;
inline constexpr Result kContextIsDestroyed = 709;
inline constexpr Result kHostMemoryAlreadyRegistered = 712;
inline constexpr Result kHostMemoryNotRegistered = 713;
inline constexpr Result kLaunchFailed = 719;
inline constexpr Result kNotSupported = 801;
inline constexpr Result kCaptureUnsupported = 900;
inline constexpr Result kCaptureInvalidated = 901;
inline constexpr Result kCaptureMerge = 902;
inline constexpr Result kCaptureUnjoined = 904;
inline constexpr Result kCaptureIsolation = 905;
inline constexpr Result kCaptureImplicit = 906;
inline constexpr Result kCapturedEvent = 907;
inline constexpr Result kUnknown = 999;

/// An attribute of a device: the NUMA node of the host that is nearest, -1 for none. From
/// CUDA 12.2.
inline constexpr int kHostNumaId = 134;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostRegisterPortable = 1;

/// What calls of a thread may do while there is a capture.
using CaptureMode = int;
inline constexpr CaptureMode kCaptureGlobal = 0;
inline constexpr CaptureMode kCaptureThreadLocal = 1;
inline constexpr CaptureMode kCaptureRelaxed = 2;

/// cuGetProcAddress: streams of value 0 are the legacy default stream, not the thread's.
inline constexpr unsigned long long kLegacyStream = 1;

}  // namespace datastates::cuda
