#include "streams.h"

#include <algorithm>
#include <utility>

namespace datastates::fake_cuda {
namespace {

constexpr Handle kStep = 16;  // as if they were addresses

bool is_legacy(const Stream& stream) {
    return stream.handle == 0;
}

cuda::Result invalidate(Capture& capture, cuda::Result result) {
    capture.invalidated = true;
    return result;
}

}  // namespace

void Streams::reset() {
    for (auto& [device, context] : contexts_) {
        const int held = context.references - context.refused - (context.kept ? 1 : 0);
        const int late = context.late + std::max(held, 0);
        context = {};
        context.late = late;
    }
    devices_.clear();
    streams_.clear();
    events_.clear();
    captures_.clear();
    captured_ = 0;
}

cuda::Result Streams::retain(int device) {
    PrimaryContext& context = contexts_[device];
    if (context.references++ > 0) return cuda::kSuccess;
    context.handle = next_handle_ += kStep;
    ++context.created;
    context.legacy = {};
    context.legacy.device = device;
    devices_.emplace(context.handle, device);
    return cuda::kSuccess;
}

cuda::Result Streams::release(int device, bool& ended) {
    PrimaryContext& context = contexts_[device];
    if (context.references == 0) return cuda::kInvalidContext;
    ended = --context.references == 0;
    if (!ended) return cuda::kSuccess;
    context.handle = 0;
    std::erase_if(streams_, [device](const auto& each) { return each.second.device == device; });
    std::erase_if(events_, [device](const auto& each) { return each.second.device == device; });
    return cuda::kSuccess;
}

bool Streams::release_late(int device) {
    int& late = contexts_[device].late;
    if (late == 0) return false;
    --late;
    return true;
}

void Streams::keep(int device) {
    if (!std::exchange(contexts_[device].kept, true)) retain(device);
}

cuda::Result Streams::device_of(Handle context, int& device) const {
    const auto found = devices_.find(context);
    if (found == devices_.end()) return cuda::kInvalidContext;
    device = found->second;
    return contexts_.at(device).handle == context ? cuda::kSuccess : cuda::kContextIsDestroyed;
}

Handle Streams::add_stream(int device, bool blocking, bool counted) {
    const Handle handle = next_handle_ += kStep;
    streams_[handle] = {.handle = handle,
                        .device = device,
                        .blocking = blocking,
                        .counted = counted,
                        .foreign = false,
                        .last = nullptr,
                        .capture = nullptr};
    return handle;
}

Stream* Streams::stream(int device, Handle handle) {
    if (handle <= 1) return &contexts_[device].legacy;  // the driver's other name for it is 1
    const auto found = streams_.find(handle);
    if (found == streams_.end()) return nullptr;
    return &found->second;
}

void Streams::remove_stream(Handle handle) {
    streams_.erase(handle);
}

Handle Streams::add_event(int device) {
    const Handle handle = next_handle_ += kStep;
    events_[handle] = {.device = device, .recorded = nullptr, .capture = nullptr};
    return handle;
}

Event* Streams::event(Handle handle) {
    const auto found = events_.find(handle);
    return found == events_.end() ? nullptr : &found->second;
}

std::uint64_t Streams::live_streams() const {
    return static_cast<std::uint64_t>(
        std::ranges::count_if(streams_, [](const auto& each) { return each.second.counted; }));
}

cuda::Result Streams::enqueue(Stream& stream, const WorkPointer& work, const WorkPointer& leader) {
    if (stream.capture) {
        if (work->when_finished) work->when_finished();
        if (stream.capture->invalidated) return cuda::kCaptureInvalidated;
        if (stream.handle != stream.capture->origin) stream.capture->unjoined.insert(stream.handle);
        ++captured_;
        return cuda::kSuccess;
    }
    work->device = stream.device;
    work->stream = stream.handle;
    std::vector<WorkPointer> leaders{stream.last, leader};
    if (is_legacy(stream)) {
        if (const auto captures = captures_beside_legacy(stream.device); !captures.empty()) {
            if (work->when_finished) work->when_finished();
            for (const auto& capture : captures) capture->invalidated = true;
            return cuda::kCaptureImplicit;
        }
        for (const auto& [handle, other] : streams_) {
            if (other.blocking && other.device == stream.device) leaders.push_back(other.last);
        }
    } else if (stream.blocking) {
        leaders.push_back(contexts_[stream.device].legacy.last);
    }
    scheduler_.submit(work, leaders);
    stream.last = work;
    return cuda::kSuccess;
}

cuda::Result Streams::record(Event& event, Stream& stream, bool engines) {
    auto work = std::make_shared<Work>();
    work->engines = engines;
    if (const cuda::Result result = enqueue(stream, work)) return result;
    event.capture = stream.capture;
    event.captured_in = stream.handle;
    event.recorded = stream.capture ? nullptr : work;
    return cuda::kSuccess;
}

cuda::Result Streams::wait(Stream& stream, const Event& event, bool engines) {
    if (!event.capture) {
        if (!event.recorded) return cuda::kSuccess;
        if (stream.capture) return invalidate(*stream.capture, cuda::kCaptureIsolation);
        auto work = std::make_shared<Work>();
        work->engines = engines;
        return enqueue(stream, work, event.recorded);
    }
    if (std::ranges::find(captures_, event.capture) == captures_.end()) return cuda::kCapturedEvent;
    Capture& capture = *event.capture;
    if (is_legacy(stream)) return invalidate(capture, cuda::kCaptureImplicit);
    if (!stream.capture) stream.capture = event.capture;
    if (stream.capture != event.capture) {
        stream.capture->invalidated = true;
        return invalidate(capture, cuda::kCaptureMerge);
    }
    if (event.captured_in != stream.handle) capture.unjoined.erase(event.captured_in);
    if (stream.handle != capture.origin) capture.unjoined.insert(stream.handle);
    return cuda::kSuccess;
}

void Streams::begin_capture(Stream& stream, cuda::CaptureMode mode) {
    stream.capture = std::make_shared<Capture>();
    stream.capture->mode = mode;
    stream.capture->thread = std::this_thread::get_id();
    stream.capture->origin = stream.handle;
    captures_.push_back(stream.capture);
}

cuda::Result Streams::end_capture(Stream& stream) {
    const CapturePointer capture = stream.capture;
    if (!capture || capture->origin != stream.handle) return cuda::kInvalidValue;
    std::erase(captures_, capture);
    for (auto& [handle, other] : streams_) {
        if (other.capture == capture) other.capture.reset();
    }
    if (capture->invalidated) return cuda::kCaptureInvalidated;
    return capture->unjoined.empty() ? cuda::kSuccess : cuda::kCaptureUnjoined;
}

cuda::Result Streams::check_unsafe(cuda::CaptureMode mode) {
    if (mode == cuda::kCaptureRelaxed) return cuda::kSuccess;
    cuda::Result result = cuda::kSuccess;
    for (const CapturePointer& capture : captures_) {
        const bool own = capture->thread == std::this_thread::get_id();
        const bool minds =
            own ? capture->mode != cuda::kCaptureRelaxed
                : mode == cuda::kCaptureGlobal && capture->mode == cuda::kCaptureGlobal;
        if (minds) result = invalidate(*capture, cuda::kCaptureUnsupported);
    }
    return result;
}

std::vector<CapturePointer> Streams::captures_beside_legacy(int device) const {
    std::vector<CapturePointer> found;
    for (const auto& [handle, stream] : streams_) {
        if (stream.blocking && stream.device == device && stream.capture) {
            found.push_back(stream.capture);
        }
    }
    return found;
}

}  // namespace datastates::fake_cuda
