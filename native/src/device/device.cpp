#include "device/device.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <new>
#include <thread>
#include <utility>

namespace datastates {
namespace {

/// More than are in use at a time where copies are bounded.
constexpr std::size_t kMostSpareEvents = 256;

/// For calls before or after which copies are under way, which must be waited for.
template <typename Call>
MaybeFault caught(const Call& call) noexcept {
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

DeviceScope::DeviceScope(DeviceApi& api, int device) : api_(api), fault_(api.enter(device)) {
    if (fault_) return;
    fault_ = api_.exchange_capture(mode_);  // wants a context
    if (fault_) api_.leave();
}

DeviceScope::~DeviceScope() {
    if (fault_) return;
    static_cast<void>(api_.exchange_capture(mode_));
    api_.leave();
}

Device::Device(std::shared_ptr<DeviceApi> api, int number) : api_(std::move(api)), number_(number) {
    spare_events_.reserve(kMostSpareEvents);
}

MaybeFault Device::open(std::shared_ptr<DeviceApi> api, int number,
                        std::shared_ptr<Device>& device) {
    int count = 0;
    if (auto fault = api->device_count(count)) return fault;
    if (number < 0 || number >= count) {
        return Fault{.kind = FaultKind::kDevice,
                     .path = {},
                     .operation = "opening device " + std::to_string(number),
                     .detail = "there are " + std::to_string(count) + " devices"};
    }
    std::shared_ptr<Device> opened(new Device(std::move(api), number));
    if (auto fault = opened->api_->retain(number)) return fault;
    opened->retained_ = true;
    const DeviceScope scope(*opened->api_, number);
    if (scope.fault()) return scope.fault();
    if (auto fault = opened->api_->create_stream(opened->save_stream_)) return fault;
    if (auto fault = opened->api_->create_stream(opened->restore_stream_)) return fault;
    device = std::move(opened);
    return std::nullopt;
}

Device::~Device() {
    if (!retained_) return;
    {
        const DeviceScope scope(*api_, number_);
        for (const StreamHandle stream : {save_stream_, restore_stream_}) {
            if (stream != 0 && !scope.fault()) api_->destroy_stream(stream);
        }
        for (const EventHandle event : spare_events_) {
            if (!scope.fault()) api_->destroy_event(event);
        }
    }
    api_->release(number_);
}

int Device::near_node() const {
    return api_->near_node(number_);
}

MaybeFault Device::record(StreamHandle stream, std::shared_ptr<DeviceEvent>& event) {
    const DeviceScope scope(*api_, number_);
    if (scope.fault()) return scope.fault();
    std::shared_ptr<DeviceEvent> made;
    if (auto fault = create_event(made)) return fault;
    if (auto fault = api_->record(made->handle(), stream)) return fault;
    event = std::move(made);
    return std::nullopt;
}

MaybeFault Device::create_event(std::shared_ptr<DeviceEvent>& event) {
    auto made = std::make_shared<DeviceEvent>(shared_from_this());
    {
        const std::scoped_lock lock(mutex_);
        if (!spare_events_.empty()) {
            made->handle_ = spare_events_.back();
            spare_events_.pop_back();
        }
    }
    if (made->handle_ == 0) {
        if (auto fault = api_->create_event(made->handle_)) return fault;
    }
    event = std::move(made);
    return std::nullopt;
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
    if (!scope.fault()) api_->destroy_event(event);
}

MaybeFault Device::copy(Direction direction, std::span<const DeviceCopy> copies,
                        StreamHandle stream, const Fences& fences,
                        std::shared_ptr<DeviceEvent>& done) {
    const DeviceScope scope(*api_, number_);
    if (scope.fault()) return scope.fault();
    for (const auto& fence : fences) {
        if (fence->device().get() != this) continue;
        if (auto fault = api_->stream_wait(stream, fence->handle())) return fault;
    }
    std::shared_ptr<DeviceEvent> event;  // first: without one, the copies could not be waited for
    if (auto fault = create_event(event)) return fault;
    auto fault = caught([&] {
        const std::vector<DeviceCopy> pieces = cut(direction, copies);
        return api_->copy(direction, pieces.empty() ? copies : pieces, stream);
    });
    // Recorded after a fault, too: some of the copies may be under way.
    for (const bool again : {false, true}) {
        auto unrecorded = caught([&] { return api_->record(event->handle(), stream); });
        if (!unrecorded) {
            done = std::move(event);
            break;
        }
        // What is refused twice will always be: as of a device that runs nothing any more.
        if (!again && !fault) fault = std::move(unrecorded);
    }
    return fault;
}

MaybeFault Device::hold(StreamHandle stream, const DeviceEvent& event) {
    const DeviceScope scope(*api_, number_);
    if (scope.fault()) return scope.fault();
    return api_->stream_wait(stream, event.handle());
}

DeviceEvent::~DeviceEvent() {
    if (handle_ != 0) device_->give_back(handle_);
}

MaybeFault DeviceEvent::is_done(bool& done) const {
    DeviceApi& api = device_->api();
    const DeviceScope scope(api, device_->number());
    if (scope.fault()) return scope.fault();
    return api.is_done(handle_, done);
}

MaybeFault DeviceEvent::wait(const std::function<bool()>& give_up, bool& done) const {
    // A copy of a segment takes 150 us or more on today's links.
    constexpr std::chrono::microseconds kFirst(20);
    constexpr std::chrono::microseconds kLast(500);
    return caught([&]() -> MaybeFault {
        DeviceApi& api = device_->api();
        const DeviceScope scope(api, device_->number());
        if (scope.fault()) return scope.fault();
        for (auto pause = kFirst;; pause = std::min(2 * pause, kLast)) {
            if (auto fault = api.is_done(handle_, done)) return fault;
            device_->set_dead(false);
            if (done || give_up()) return std::nullopt;
            std::this_thread::sleep_for(pause);
        }
    });
}

MaybeFault DeviceEvent::wait_idle(const std::function<bool()>& give_up, bool& idle) const {
    // The copies may be under way whatever the driver would not say just now, and their memory must
    // not be used for anything else then. An error that stays is another thing: with it, nothing
    // runs any more.
    constexpr int kStays = 8;
    auto pause = std::chrono::milliseconds(1);
    const auto fault = wait(give_up, idle);
    auto again = fault;
    for (int asked = 1; again && asked < kStays && !device_->dead(); ++asked, pause *= 2) {
        std::this_thread::sleep_for(pause);
        again = wait(give_up, idle);
    }
    if (again) {
        if (again->kind == FaultKind::kDevice) device_->set_dead(true);
        idle = true;
    }
    return fault;
}

MaybeFault PinnedMemory::pin(std::shared_ptr<Device> device, std::span<std::byte> memory,
                             std::unique_ptr<PinnedMemory>& pinned) {
    DeviceApi& api = device->api();
    const DeviceScope scope(api, device->number());
    if (scope.fault()) return scope.fault();
    // Made first: what is registered will be unregistered.
    std::unique_ptr<PinnedMemory> made(new PinnedMemory(std::move(device), nullptr));
    if (auto fault = api.register_host(memory.data(), memory.size())) return fault;
    made->data_ = memory.data();
    pinned = std::move(made);
    return std::nullopt;
}

PinnedMemory::~PinnedMemory() {
    if (data_ == nullptr) return;
    DeviceApi& api = device_->api();
    const DeviceScope scope(api, device_->number());
    if (!scope.fault()) api.unregister_host(data_);
}

}  // namespace datastates
