#include "device/devices.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include "base/threads.h"
#include "device/cuda_api.h"

namespace datastates {
MaybeFault Devices::open(int device) {
    const std::scoped_lock lock(mutex_);
    if (stopping_) return shut_down();
    if (lanes_.contains(device)) return std::nullopt;
    if (!api_) {
        if (auto fault = open_cuda(cuda_library(), api_)) return fault;
    }
    std::shared_ptr<Device> opened;
    if (auto fault = Device::open(api_, device, opened)) return fault;
    if (!pin_thread_.joinable()) {
        pin_thread_ = start_thread("ds-pin", [this] { pin_loop(); });
    }
    lanes_.emplace(device, std::make_unique<DeviceLane>(std::move(opened), patience_));
    pin_ = true;
    pin_wanted_.notify_one();
    return std::nullopt;
}

DeviceLane* Devices::lane(int device) const {
    const std::scoped_lock lock(mutex_);
    const auto found = lanes_.find(device);
    return found == lanes_.end() ? nullptr : found->second.get();
}

std::shared_ptr<Device> Devices::find(int device) const {
    const DeviceLane* const found = lane(device);
    return found == nullptr ? nullptr : found->device();
}

void Devices::grow(std::uint64_t nbytes) {
    // At once for a thread that asks `await_pinned`: the cache gives new memory to those who wait
    // for it.
    const std::scoped_lock lock(mutex_);
    cache_->grow(nbytes);
    if (lanes_.empty()) return;  // `open` will see to it
    pin_ = true;
    pin_wanted_.notify_one();
}

MaybeFault Devices::await_pinned(const std::byte* data, std::uint64_t nbytes) const {
    constexpr std::chrono::milliseconds kPoll(50);
    if (!cache_->has(data)) return std::nullopt;
    const auto since = Clock::now();
    std::unique_lock lock(mutex_);
    const auto settled = [&] {
        return pin_fault_ || !(pin_ || preparing_) || is_pinned(data, nbytes);
    };
    while (!pin_changed_.wait_for(lock, kPoll, settled)) {
        if (patience_.is_over(since)) return shut_down();
    }
    return std::nullopt;
}

bool Devices::is_pinned(const std::byte* data, std::uint64_t nbytes) const {
    const std::byte* at = data;  // up to here it is
    while (at < data + nbytes) {
        const auto after = pinned_.upper_bound(at);
        if (after == pinned_.begin()) return false;
        const auto& [begin, size] = *std::prev(after);
        if (at >= begin + size) return false;
        at = begin + size;
    }
    return true;
}

bool Devices::prepared() const {
    const std::scoped_lock lock(mutex_);
    return stopping_ || (!pin_ && !preparing_);
}

MaybeFault Devices::pin_fault() const {
    const std::scoped_lock lock(mutex_);
    return pin_fault_;
}

void Devices::pin_loop() {
    while (true) {
        std::shared_ptr<Device> device;
        {
            std::unique_lock lock(mutex_);
            preparing_ = false;
            pin_changed_.notify_all();
            pin_wanted_.wait(lock, [&] { return (pin_ && !lanes_.empty()) || stopping_; });
            if (stopping_) return;
            pin_ = false;
            preparing_ = true;
            device = lanes_.begin()->second->device();
        }
        try {
            for (const HostCache::Memory& arena : cache_->unpinned()) {
                if (!pin_arena(device, arena)) return;
            }
        } catch (const std::bad_alloc&) {
            const std::scoped_lock lock(mutex_);
            pin_fault_ = out_of_memory("pin");
        }
    }
}

/// False if the devices are shut down meanwhile.
bool Devices::pin_arena(const std::shared_ptr<Device>& device, const HostCache::Memory& arena) {
    // What is pinned stays so, whatever fails: copies may use it already.
    auto& pins = cache_->pins_of(arena.index, divide_up(arena.bytes.size(), kPinBytes) + 1);
    for (auto left = arena.bytes; !left.empty();) {
        const auto begin = reinterpret_cast<std::uintptr_t>(left.data());
        const auto part =
            left.first(std::min<std::uint64_t>(left.size(), kPinBytes - begin % kPinBytes));
        left = left.subspan(part.size());
        std::unique_ptr<PinnedMemory> pinned;
        auto fault = PinnedMemory::pin(device, part, pinned);
        if (pinned) {
            pins.push_back(std::move(pinned));
            pinned_bytes_ += part.size();
        }
        const std::scoped_lock lock(mutex_);
        if (!fault) pinned_.emplace(part.data(), part.size());
        pin_changed_.notify_all();
        if (stopping_) return false;
        if (!fault) continue;
        pin_fault_ = std::move(fault);
        return true;
    }
    return true;
}

void Devices::shutdown() {
    std::jthread pinning;
    {
        const std::scoped_lock lock(mutex_);
        stopping_ = true;
        patience_.begin();
        pinning.swap(pin_thread_);
        pin_wanted_.notify_all();
        pin_changed_.notify_all();
    }
    if (pinning.joinable()) pinning.join();
    for (const auto& [number, lane] : lanes_) lane->shutdown();  // stopping_: no more are added
}

}  // namespace datastates
