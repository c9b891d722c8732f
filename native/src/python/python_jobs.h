// The engine's objects as Python holds them: safe in a forked child, and alive with what they need.

#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/fork_guard.h"
#include "base/immovable.h"
#include "base/status.h"
#include "memory/host_cache.h"
#include "pipeline/engine.h"
#include "pipeline/restore_job.h"
#include "pipeline/restore_pipeline.h"
#include "pipeline/save_job.h"
#include "pipeline/window.h"
#include "python/python_gil.h"

namespace datastates {

struct PyWindow {
    explicit PyWindow(std::shared_ptr<Window> made) : window(std::move(made)) {}

    ProcessBound<Window> window;
};

struct PySlab {
    PySlab(std::shared_ptr<Lease> granted, std::uint64_t size)
        : data(granted->data()), nbytes(size), lease(std::move(granted)) {}

    std::byte* data;
    std::uint64_t nbytes;
    ProcessBound<Lease> lease;
};

struct PyDeviceEvent : Immovable {
    explicit PyDeviceEvent(std::shared_ptr<DeviceEvent> recorded)
        : device(recorded->device()->number()), event(std::move(recorded)) {}
    ~PyDeviceEvent() {  // NOLINT(bugprone-exception-escape): as of PyJob
        auto dropped = event.take();
        const GilRelease release;  // the driver may keep it waiting
        dropped.reset();
    }

    int device;
    ProcessBound<DeviceEvent> event;
    std::optional<Fault> fault;  ///< the first of its waits; with the GIL
};

using PyFences = std::vector<const PyDeviceEvent*>;

/// The events, or RuntimeError in a forked child.
Fences to_fences(const PyFences& events);

struct RestorePlan {
    std::vector<RestoreFile> files;
};

/// A job's handle, and the Python object that keeps its memory alive: in this order, the handle
/// goes first, and the memory once no thread touches it.
template <typename Handle>
struct PyJob : Immovable {  // NOLINT(cppcoreguidelines-special-member-functions)
    PyJob(std::shared_ptr<Handle> job, pybind11::object memory)
        : keepalive(std::move(memory)), handle(std::move(job)) {}
    // Of what may throw there, only memory can be missing, and nothing could be done about it.
    ~PyJob() { drop_handle(); }  // NOLINT(bugprone-exception-escape)

    /// Waits for copies under way, without the GIL. Idempotent.
    void drop_handle() {
        auto dropped = handle.take();  // with the GIL: a finalizer may have made others see the job
        const GilRelease release;
        dropped.reset();
    }

    pybind11::object keepalive;
    ProcessBound<Handle> handle;
};

/// A piece of a streamed file. Any thread may drop it, at any time.
struct PySegment : Immovable {
    explicit PySegment(std::shared_ptr<Piece> taken)
        : bytes(taken->bytes), piece(std::move(taken)) {}
    ~PySegment() {  // NOLINT(bugprone-exception-escape): as of PyJob
        auto dropped = piece.take();
        const GilRelease release;  // the cache may go with it
        dropped.reset();
    }

    std::span<const std::byte> bytes;
    ProcessBound<Piece> piece;
};

struct PyReadRequest : Immovable {
    explicit PyReadRequest(std::shared_ptr<ReadRequest> taken)
        : fetch(taken->fetch()), request(std::move(taken)) {}
    ~PyReadRequest() {  // NOLINT(bugprone-exception-escape): as of PyJob
        auto dropped = request.take();
        const GilRelease release;
        dropped.reset();
    }

    Fetch fetch;
    ProcessBound<ReadRequest> request;  ///< until filled
};

/// An iterator whose items others make ready. It does not keep the job's handle.
template <typename Item>
struct PyItems : Immovable {  // NOLINT(cppcoreguidelines-special-member-functions)
    /// As SaveJob::take.
    using Next = std::function<std::optional<Result<std::shared_ptr<Item>>>(Clock::time_point)>;

    explicit PyItems(Next make) : next(std::make_shared<Next>(std::move(make))) {}
    ~PyItems() {  // NOLINT(bugprone-exception-escape): as of PyJob
        auto dropped = next.take();
        const GilRelease release;
        dropped.reset();
    }

    ProcessBound<Next> next;
};

using PySaveJob = PyJob<SaveHandle>;
using PyRestoreJob = PyJob<RestoreHandle>;

struct PyEngine : Immovable {
    ProcessBound<Engine> engine;

    explicit PyEngine(std::shared_ptr<Engine> made) : engine(std::move(made)) {}
    ~PyEngine() {                  // NOLINT(bugprone-exception-escape): as above
        const GilRelease release;  // it joins threads
        engine.reset();
    }
};

}  // namespace datastates
