// Contexts, streams, events and captures, by their handles, and the order that they give to work.
// Guarded by the driver's mutex.

#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "device/cuda_abi.h"
#include "scheduler.h"

namespace datastates::fake_cuda {

/// Never an address: a stale one is found out, and not followed.
using Handle = std::uintptr_t;

struct Capture {
    cuda::CaptureMode mode = cuda::kCaptureGlobal;
    std::thread::id thread;  ///< that began it
    Handle origin = 0;
    bool invalidated = false;
    std::set<Handle> unjoined;  ///< streams with captured work that the origin does not follow
};
using CapturePointer = std::shared_ptr<Capture>;

struct Stream {
    Handle handle = 0;
    int device = 0;
    bool blocking = true;  ///< keeps the order of the legacy default stream
    bool counted = false;
    bool foreign = false;  ///< of another context than the primary one
    WorkPointer last;
    CapturePointer capture;  ///< that it takes part in
};

struct Event {
    int device = 0;
    WorkPointer recorded;    ///< null: complete
    CapturePointer capture;  ///< that it was recorded in last
    Handle captured_in = 0;  ///< the stream
};

/// What a device has one of.
struct PrimaryContext {
    Handle handle = 0;
    int references = 0;
    std::uint64_t created = 0;
    bool kept = false;  ///< by the training process
    int refused = 0;    ///< releases that failed, and do not come again
    int late = 0;       ///< references of before a reset, whose releases are still to come
    Stream legacy;
};

class Streams {
  public:
    explicit Streams(Scheduler& scheduler) : scheduler_(scheduler) {}

    void reset();

    // Contexts.
    cuda::Result retain(int device);
    /// True if that was the last reference: its streams and events are gone.
    cuda::Result release(int device, bool& ended);
    /// Whether this is the release of a reference of before a reset.
    bool release_late(int device);
    void refuse_release(int device) { ++contexts_[device].refused; }
    /// As a framework that uses the device for the first time.
    void keep(int device);
    [[nodiscard]] const PrimaryContext& context(int device) { return contexts_[device]; }
    cuda::Result device_of(Handle context, int& device) const;

    // Streams and events: null if there is none in that device's context.
    Handle add_stream(int device, bool blocking, bool counted);
    Stream* stream(int device, Handle handle);
    void remove_stream(Handle handle);
    Handle add_event(int device);
    Event* event(Handle handle);
    bool remove_event(Handle handle) { return events_.erase(handle) == 1; }
    [[nodiscard]] std::uint64_t live_streams() const;
    [[nodiscard]] std::uint64_t live_events() const { return events_.size(); }

    /// Work of a stream that is being captured is dropped at once; its number stays 0.
    cuda::Result enqueue(Stream& stream, const WorkPointer& work,
                         const WorkPointer& leader = nullptr);
    cuda::Result record(Event& event, Stream& stream, bool engines);
    cuda::Result wait(Stream& stream, const Event& event, bool engines);

    // Captures.
    void begin_capture(Stream& stream, cuda::CaptureMode mode);
    cuda::Result end_capture(Stream& stream);
    /// Of a call that captures do not see: refused, and the captures that it might break
    /// invalidated, unless the calling thread's mode allows it.
    cuda::Result check_unsafe(cuda::CaptureMode mode);
    [[nodiscard]] std::uint64_t captured() const { return captured_; }

  private:
    [[nodiscard]] std::vector<CapturePointer> captures_beside_legacy(int device) const;

    Scheduler& scheduler_;
    Handle next_handle_ = 0x1000;             // never used twice
    std::map<int, PrimaryContext> contexts_;  // by device
    std::map<Handle, int> devices_;           // of all contexts that ever were
    std::map<Handle, Stream> streams_;
    std::map<Handle, Event> events_;
    std::vector<CapturePointer> captures_;  // under way
    std::uint64_t captured_ = 0;
};

}  // namespace datastates::fake_cuda
