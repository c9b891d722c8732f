#include "device/pinner.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <new>
#include <utility>

#include "base/sizes.h"
#include "base/threads.h"
#include "memory/arena.h"

namespace datastates {

void Pinner::start(const std::shared_ptr<Device>& device) {
    const std::scoped_lock lock(mutex_);
    if (device_ || stopping_) return;
    thread_ = start_thread("ds-pin", [this] { loop(); });
    device_ = device;
    wanted_.notify_one();
}

void Pinner::grow(std::uint64_t nbytes) {
    // The cache gives new memory at once to threads that wait for some: they must find here that it
    // is going to be pinned.
    const std::scoped_lock lock(mutex_);
    cache_->grow(nbytes);
    look_ = true;
    wanted_.notify_one();
}

bool Pinner::idle() const {
    const std::scoped_lock lock(mutex_);
    return stopping_ || is_idle();
}

std::optional<Fault> Pinner::node_fault() const {
    const std::scoped_lock lock(mutex_);
    return node_fault_;
}

bool Pinner::is_idle() const {
    return !device_ || (!look_ && !pinning_ && pieces_.empty());
}

std::optional<Fault> Pinner::fault() const {
    const std::scoped_lock lock(mutex_);
    return fault_;
}

Status Pinner::wait(const std::byte* data, std::uint64_t nbytes) {
    constexpr std::chrono::milliseconds kPoll(50);
    if (!cache_->has(data)) return {};
    const auto since = Clock::now();
    std::unique_lock lock(mutex_);
    const auto place = waited_for_.insert(waited_for_.end(), {data, nbytes});
    const auto settled = [&] {
        return fault_ || is_idle() || stopping_ || first_unpinned(*place) == nullptr;
    };
    Status status;
    while (status.ok() && !changed_.wait_for(lock, kPoll, settled)) {
        if (patience_.is_over(since)) status = shut_down();
    }
    if (stopping_ && !fault_ && first_unpinned(*place) != nullptr) status = shut_down();
    waited_for_.erase(place);
    return status;
}

/// Null if all of it is pinned.
const std::byte* Pinner::first_unpinned(Bytes memory) const {
    const std::byte* const end = memory.data() + memory.size();
    const std::byte* at = memory.data();
    while (at < end) {
        const auto after = pinned_.upper_bound(at);
        if (after == pinned_.begin()) return at;
        const auto& [begin, nbytes] = *std::prev(after);
        if (at >= begin + nbytes) return at;
        at = begin + nbytes;
    }
    return nullptr;
}

void Pinner::find_pieces() {
    look_ = false;
    for (const HostCache::Memory& arena : cache_->unpinned()) {
        static_cast<void>(
            cache_->pins_of(arena.index, divide_up(arena.bytes.size(), kPinBytes) + 1));
        for (auto left = arena.bytes; !left.empty();) {
            const auto begin = reinterpret_cast<std::uintptr_t>(left.data());
            const auto part =
                left.first(std::min<std::uint64_t>(left.size(), kPinBytes - begin % kPinBytes));
            pieces_.emplace(part.data(), Piece{.arena = arena.index, .bytes = part});
            left = left.subspan(part.size());
        }
    }
}

Pinner::Piece Pinner::take_piece() {
    auto taken = pieces_.begin();
    for (const Bytes& memory : waited_for_) {
        const std::byte* const at = first_unpinned(memory);
        const auto after = pieces_.upper_bound(at);
        if (at == nullptr || after == pieces_.begin()) continue;
        const auto found = std::prev(after);
        if (!lies_in(found->second.bytes, at, 1)) continue;  // it is no piece's any more
        taken = found;
        break;
    }
    const Piece piece = taken->second;
    pieces_.erase(taken);
    return piece;
}

void Pinner::loop() {
    {
        std::unique_lock lock(mutex_);
        wanted_.wait(lock, [&] { return device_ || stopping_; });
    }
    Status near;
    if (device_) near = prefer_node(device_->near_node());  // set once
    std::unique_lock lock(mutex_);
    if (!near.ok()) node_fault_ = std::move(near).fault();
    while (!stopping_) {
        try {
            if (look_) find_pieces();
            if (pieces_.empty()) {
                changed_.notify_all();
                wanted_.wait(lock, [&] { return look_ || stopping_; });
                continue;
            }
            const Piece piece = take_piece();
            pinning_ = true;
            lock.unlock();
            auto pinned = pin(piece);
            lock.lock();
            if (!pinned.ok()) give_up(std::move(pinned).fault());
        } catch (const std::bad_alloc&) {
            if (!lock.owns_lock()) lock.lock();
            give_up(out_of_memory("pin"));
        }
        pinning_ = false;
        changed_.notify_all();
    }
}

void Pinner::give_up(Fault fault) {
    fault_ = std::move(fault);
    pieces_.clear();
}

Status Pinner::pin(const Piece& piece) {
    fault_in(piece.bytes);
    {
        std::unique_lock lock(mutex_);
        if (wanted_.wait_until(lock, next_, [&] { return stopping_; })) return {};
    }
    // What is pinned stays so, whatever fails: copies may use it already.
    auto& pins = cache_->pins_of(piece.arena, 0);
    const auto began = Clock::now();
    auto pinned = PinnedMemory::pin(device_, piece.bytes);
    next_ = Clock::now() + (Clock::now() - began);
    if (!pinned.ok()) return std::move(pinned).fault();
    pins.push_back(*std::move(pinned));  // there is room
    pinned_bytes_ += piece.bytes.size();
    const std::scoped_lock lock(mutex_);
    pinned_.emplace(piece.bytes.data(), piece.bytes.size());
    return {};
}

void Pinner::shutdown() {
    std::jthread thread;
    {
        const std::scoped_lock lock(mutex_);
        stopping_ = true;
        thread.swap(thread_);
        wanted_.notify_all();
        changed_.notify_all();
    }
    if (thread.joinable()) thread.join();
}

}  // namespace datastates
