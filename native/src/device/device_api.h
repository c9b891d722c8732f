// What the engine asks of an accelerator's driver: a table of calls, as an interface. CudaApi is
// one implementation; another driver is another one. Nothing here knows files, segments or jobs.
//
// Every call but `device_count`, `retain`, `release` and `near_node` is made by a thread that
// `enter` has bound to the device's context. A call that fails returns a fault of kind
// kDevice, whose `error` is the driver's code, `operation` the driver's name for the call, and
// `detail` the driver's name and words for the code. No call waits for the device, but for copies
// from or to memory that is not registered.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/immovable.h"
#include "base/status.h"
#include "memory/copies.h"

namespace datastates {

/// The driver's handles. Zero is the legacy default stream, and no event.
using StreamHandle = std::uintptr_t;
using EventHandle = std::uintptr_t;

/// How calls of a thread bear on graphs that are being captured, in the driver's numbers.
using CaptureMode = int;
/// They break none.
inline constexpr CaptureMode kRelaxedCapture = 2;

class DeviceApi : public Immovable {
  public:
    virtual ~DeviceApi() = default;

    virtual Result<int> device_count() = 0;

    /// Takes a reference to the primary context of `device`, which exists already where the process
    /// uses the device. Binds nothing.
    virtual Status retain(int device) = 0;
    virtual void release(int device) = 0;

    /// The NUMA node of the host that is nearest to a retained `device`; -1 if unknown.
    virtual int near_node(int device) = 0;

    /// Binds the calling thread to the context of a retained `device`; `leave` restores what was
    /// bound before. Pairs nest.
    virtual Status enter(int device) = 0;
    virtual void leave() = 0;

    /// Gives the calling thread another mode, and returns the one that it had.
    virtual Result<CaptureMode> exchange_capture(CaptureMode mode) = 0;

    /// A stream that does not wait for the legacy default stream. (A priority would change nothing:
    /// copies ignore it.)
    virtual Result<StreamHandle> create_stream() = 0;
    virtual void destroy_stream(StreamHandle stream) = 0;

    /// An event without timing.
    virtual Result<EventHandle> create_event() = 0;
    virtual void destroy_event(EventHandle event) = 0;
    virtual Status record(EventHandle event, StreamHandle stream) = 0;
    virtual Result<bool> is_done(EventHandle event) = 0;
    virtual Status stream_wait(StreamHandle stream, EventHandle event) = 0;

    /// Enqueues copies from device to host (kGather) or from host to device (kScatter); in one call
    /// of the driver where it has such a call and there are several. They may run in any order.
    /// After a fault, any number of them may have been enqueued.
    virtual Status copy(Direction direction, std::span<const DeviceCopy> copies,
                        StreamHandle stream) = 0;

    /// Pins host memory, for all devices.
    virtual Status register_host(std::byte* data, std::uint64_t nbytes) = 0;
    virtual void unregister_host(std::byte* data) = 0;
};

}  // namespace datastates
