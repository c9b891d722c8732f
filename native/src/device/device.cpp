#include "device/device.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <new>
#include <thread>
#include <type_traits>
#include <utility>

namespace datastates {
namespace {

/// More than are in use at a time where copies are bounded.
constexpr std::size_t kMostSpareEvents = 256;

/// For calls before or after which copies are under way, which must be waited for.
template <typename Call>
std::invoke_result_t<Call> caught(const Call& call) noexcept {
    try {
        return call();
    } catch (const std::bad_alloc&) {
        return out_of_memory("copy");
    }
}

/// Bytes from `data` to the next multiple of kPinBytes.
std::uint64_t until_border(const std::byte* data) {
    return kPinBytes - reinterpret_cast<std::uintptr_t>(data) % kPinBytes;
}

/// The same copies, cut where their host side crosses a border; empty if none does.
std::vector<DeviceCopy> cut(Direction direction, std::span<const DeviceCopy> copies) {
    const auto room = [direction](const DeviceCopy& copy) {
        return until_border(direction == Direction::kGather ? copy.to : copy.from);
    };
    std::vector<DeviceCopy> cut;
    if (std::ranges::all_of(copies, [&](const auto& copy) { return copy.nbytes <= room(copy); })) {
        return cut;
    }
    for (DeviceCopy left : copies) {
        while (left.nbytes > 0) {
            const std::uint64_t nbytes = std::min(left.nbytes, room(left));
            cut.push_back({.to = left.to, .from = left.from, .nbytes = nbytes});
            left = {
                .to = left.to + nbytes, .from = left.from + nbytes, .nbytes = left.nbytes - nbytes};
        }
    }
    return cut;
}

}  // namespace

Fences JobFences::take(int device) {
    Fences taken;
    const std::scoped_lock lock(mutex_);
    const auto mine = std::ranges::partition(
        fences_, [device](const auto& each) { return each->device()->number() != device; });
    taken.assign(std::make_move_iterator(mine.begin()), std::make_move_iterator(mine.end()));
    fences_.erase(mine.begin(), mine.end());
    return taken;
}

void JobFences::give_back(Fences& fences) {
    const std::scoped_lock lock(mutex_);
    std::ranges::move(fences, std::back_inserter(fences_));  // there is still room
    fences.clear();
}

Fences JobFences::take_all() {
    const std::scoped_lock lock(mutex_);
    return std::move(fences_);
}

DeviceScope::DeviceScope(DeviceApi& api, int device) : api_(api), status_(api.enter(device)) {
    if (!status_.ok()) return;
    auto before = api_.exchange_capture(kRelaxedCapture);  // wants a context
    if (before.ok()) {
        mode_ = *before;
        return;
    }
    api_.leave();
    status_ = std::move(before).fault();
}

DeviceScope::~DeviceScope() {
    if (!status_.ok()) return;
    static_cast<void>(api_.exchange_capture(mode_));
    api_.leave();
}

Device::Device(std::shared_ptr<DeviceApi> api, int number) : api_(std::move(api)), number_(number) {
    spare_events_.reserve(kMostSpareEvents);
}

Result<std::shared_ptr<Device>> Device::open(std::shared_ptr<DeviceApi> api, int number) {
    auto count = api->device_count();
    if (!count.ok()) return std::move(count).fault();
    if (number < 0 || number >= *count) {
        return Fault{.kind = FaultKind::kDevice,
                     .path = {},
                     .operation = "opening device " + std::to_string(number),
                     .detail = "there are " + std::to_string(*count) + " devices"};
    }
    std::shared_ptr<Device> opened(new Device(std::move(api), number));
    auto retained = opened->api_->retain(number);
    if (!retained.ok()) return std::move(retained).fault();
    opened->retained_ = true;
    const DeviceScope scope(*opened->api_, number);
    if (!scope.status().ok()) return scope.status().fault();
    for (CopyStreams* const streams : {&opened->save_streams_, &opened->restore_streams_}) {
        for (StreamHandle& stream : *streams) {
            auto created = opened->api_->create_stream();
            if (!created.ok()) return std::move(created).fault();
            stream = *created;
        }
    }
    return opened;
}

Device::~Device() {
    if (!retained_) return;
    {
        const DeviceScope scope(*api_, number_);
        for (const CopyStreams& streams : {save_streams_, restore_streams_}) {
            for (const StreamHandle stream : streams) {
                if (stream != 0 && scope.status().ok()) api_->destroy_stream(stream);
            }
        }
        for (const EventHandle event : spare_events_) {
            if (scope.status().ok()) api_->destroy_event(event);
        }
    }
    api_->release(number_);
}

int Device::near_node() const {
    return api_->near_node(number_);
}

Result<std::shared_ptr<DeviceEvent>> Device::record(StreamHandle stream) {
    const DeviceScope scope(*api_, number_);
    if (!scope.status().ok()) return scope.status().fault();
    auto event = create_event(stream);
    if (!event.ok()) return event;
    auto recorded = api_->record((*event)->handle(), stream);
    if (!recorded.ok()) return std::move(recorded).fault();
    return event;
}

Result<std::shared_ptr<DeviceEvent>> Device::create_event(StreamHandle stream) {
    auto made = std::make_shared<DeviceEvent>(shared_from_this());
    made->stream_ = stream;
    {
        const std::scoped_lock lock(mutex_);
        if (!spare_events_.empty()) {
            made->handle_ = spare_events_.back();
            spare_events_.pop_back();
        }
    }
    if (made->handle_ == 0) {
        auto created = api_->create_event();
        if (!created.ok()) return std::move(created).fault();
        made->handle_ = *created;
    }
    return made;
}

/// To be recorded anew: what waits for it by now waits for what it was.
void Device::give_back(EventHandle event) {
    {
        const std::scoped_lock lock(mutex_);
        if (spare_events_.size() < kMostSpareEvents) {
            spare_events_.push_back(event);  // there is room
            return;
        }
    }
    const DeviceScope scope(*api_, number_);
    if (scope.status().ok()) api_->destroy_event(event);
}

Enqueued Device::copy(Direction direction, std::span<const DeviceCopy> copies,
                      StreamHandle stream) {
    const DeviceScope scope(*api_, number_);
    if (!scope.status().ok()) return {.status = scope.status(), .done = nullptr};
    auto event = create_event(stream);  // first: without one, the copies could not be waited for
    if (!event.ok()) return {.status = std::move(event).fault(), .done = nullptr};
    Enqueued enqueued;
    enqueued.status = caught([&] {
        const std::vector<DeviceCopy> pieces = cut(direction, copies);
        return api_->copy(direction, pieces.empty() ? copies : pieces, stream);
    });
    // Recorded after a fault, too: some of the copies may be under way.
    for (const bool again : {false, true}) {
        auto recorded = caught([&] { return api_->record((*event)->handle(), stream); });
        if (recorded.ok()) {
            enqueued.done = *std::move(event);
            break;
        }
        // What is refused twice will always be: as of a device that runs nothing any more.
        if (!again && enqueued.status.ok()) enqueued.status = std::move(recorded);
    }
    return enqueued;
}

Status Device::hold(StreamHandle stream, const DeviceEvent& event) {
    const DeviceScope scope(*api_, number_);
    if (!scope.status().ok()) return scope.status();
    return api_->stream_wait(stream, event.handle());
}

DeviceEvent::~DeviceEvent() {
    if (handle_ != 0) device_->give_back(handle_);
}

Result<bool> DeviceEvent::is_done() const {
    DeviceApi& api = device_->api();
    const DeviceScope scope(api, device_->number());
    if (!scope.status().ok()) return scope.status().fault();
    return api.is_done(handle_);
}

Result<bool> DeviceEvent::wait(const std::function<bool()>& give_up) const {
    // A copy of a segment takes 150 us or more on today's links. Whoever waits notices late by an
    // eighth of that, while the copy after it keeps the device busy.
    constexpr Clock::duration kShortest = std::chrono::microseconds(20);
    constexpr Clock::duration kLongest = std::chrono::microseconds(500);
    return caught([&]() -> Result<bool> {
        DeviceApi& api = device_->api();
        const DeviceScope scope(api, device_->number());
        if (!scope.status().ok()) return scope.status().fault();
        for (const auto began = Clock::now();;) {
            auto done = api.is_done(handle_);
            if (!done.ok()) return done;
            device_->set_dead(false);
            if (*done || give_up()) return done;
            const auto waited = Clock::now() - began;
            std::this_thread::sleep_for(std::clamp(waited / 8, kShortest, kLongest));
        }
    });
}

CopyOutcome DeviceEvent::wait_idle(const std::function<bool()>& give_up) const {
    // The copies may be under way whatever the driver would not say just now, and their memory must
    // not be used for anything else then. An error that stays is another thing: with it, nothing
    // runs any more.
    constexpr int kStays = 8;
    auto pause = std::chrono::milliseconds(1);
    auto done = wait(give_up);
    if (done.ok()) return {.status = {}, .finished = *done};
    Fault first = done.fault();
    for (int asked = 1; !done.ok() && asked < kStays && !device_->dead(); ++asked, pause *= 2) {
        std::this_thread::sleep_for(pause);
        done = wait(give_up);
    }
    if (!done.ok() && done.fault().kind == FaultKind::kDevice) device_->set_dead(true);
    return {.status = std::move(first), .finished = !done.ok() || *done};
}

Result<std::unique_ptr<PinnedMemory>> PinnedMemory::pin(std::shared_ptr<Device> device,
                                                        std::span<std::byte> memory) {
    DeviceApi& api = device->api();
    const DeviceScope scope(api, device->number());
    if (!scope.status().ok()) return scope.status().fault();
    // Made first: what is registered will be unregistered.
    std::unique_ptr<PinnedMemory> made(new PinnedMemory(std::move(device), nullptr));
    auto registered = api.register_host(memory.data(), memory.size());
    if (!registered.ok()) return std::move(registered).fault();
    made->data_ = memory.data();
    return made;
}

PinnedMemory::~PinnedMemory() {
    if (data_ == nullptr) return;
    DeviceApi& api = device_->api();
    const DeviceScope scope(api, device_->number());
    if (scope.status().ok()) api.unregister_host(data_);
}

}  // namespace datastates
