#include "memory/host_cache.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "memory/copies.h"

namespace datastates {
namespace {

/// Segments that slabs, and restores, leave to the streams of saves: one to read into while another
/// is written.
constexpr std::uint64_t kStreamReserve = 2;

}  // namespace

std::uint64_t restore_share(std::uint64_t total) {
    return std::clamp<std::uint64_t>(total / 4, 1, 4);
}

Lease::Lease(std::shared_ptr<HostCache> cache, std::uint32_t first, std::byte* data)
    : cache_(std::move(cache)), first_(first), data_(data) {}

Lease::Lease(Lease&& other) noexcept
    : cache_(std::move(other.cache_)),
      first_(other.first_),
      data_(std::exchange(other.data_, nullptr)) {}

Lease& Lease::operator=(Lease&& other) noexcept {
    if (this != &other) {
        release();
        cache_ = std::move(other.cache_);
        first_ = other.first_;
        data_ = std::exchange(other.data_, nullptr);
    }
    return *this;
}

void Lease::release() {
    if (data_ == nullptr) return;
    data_ = nullptr;
    std::exchange(cache_, nullptr)->release(first_);
}

void Lease::abandon() {
    if (data_ == nullptr) return;
    data_ = nullptr;
    std::exchange(cache_, nullptr)->abandon(first_);
}

void HostCache::keep() {
    static std::mutex mutex;           // guards kept
    static HostCache* kept = nullptr;  // all of them: reached from here, they are no leak
    const std::scoped_lock both(mutex, mutex_);
    if (self_) return;
    self_ = shared_from_this();
    next_kept_ = std::exchange(kept, this);
}

void HostCache::abandon(std::uint32_t first) {
    keep();
    const std::scoped_lock lock(mutex_);
    const std::uint32_t count = slots_[first].count;
    if (slots_[first].use == Use::kSlab) slab_segments_ -= count;
    for (std::uint32_t i = first; i < first + count; ++i) slots_[i].use = Use::kLost;
    (slots_[first].share == Share::kSave ? lost_for_saves_ : lost_for_restores_) += count;
    // Who waits may do so in vain now.
    ++epoch_;
    for (Request* request : queue_) request->wake.notify_one();
}

HostCache::HostCache(std::uint64_t nbytes) {
    const std::uint64_t segments = nbytes / kSegmentBytes;
    add_arena(Arena(segments * kSegmentBytes), segments);
}

void HostCache::grow(std::uint64_t nbytes) {
    const std::uint64_t wanted = nbytes / kSegmentBytes;
    const std::scoped_lock lock(mutex_);
    if (wanted <= slots_.size()) return;
    const std::uint64_t more = wanted - slots_.size();
    add_arena(Arena(more * kSegmentBytes), more);
    serve();
}

void HostCache::add_arena(Arena arena, std::uint64_t segments) {
    const std::uint64_t before = slots_.size();
    const std::uint64_t restores_before = before - save_segments_;
    const std::uint64_t for_restores = restore_share(before + segments) - restores_before;
    const std::uint64_t for_saves = segments - for_restores;
    std::vector<Slot> added(segments);
    std::vector<std::uint32_t> added_free;
    for (std::uint64_t i = 0; i < segments; ++i) {
        added[i].data = arena.data() + i * kSegmentBytes;
        added[i].arena = arenas_.size();
        added[i].share = i < for_saves ? Share::kSave : Share::kRestore;
        added_free.push_back(static_cast<std::uint32_t>(before + i));
    }
    // Reserve first, so that what follows cannot throw.
    arenas_.reserve(arenas_.size() + 1);
    slots_.reserve(before + segments);
    free_for_saves_.reserve(before + segments);
    free_for_restores_.reserve(before + segments);
    arenas_.push_back(std::move(arena));
    slots_.insert(slots_.end(), added.begin(), added.end());
    // At the bottom of the stacks: memory that is in use already goes first. Single segments are
    // taken from the arena's top, slabs from its start, so that they do not break each other up.
    const auto first_restore = added_free.begin() + static_cast<std::ptrdiff_t>(for_saves);
    free_for_saves_.insert(free_for_saves_.begin(), added_free.begin(), first_restore);
    free_for_restores_.insert(free_for_restores_.begin(), first_restore, added_free.end());
    save_segments_ += for_saves;
}

bool HostCache::has(const std::byte* data) const {
    const std::scoped_lock lock(mutex_);
    return std::ranges::any_of(arenas_, [data](const Arena& arena) {
        return lies_in({arena.data(), arena.nbytes()}, data, 1);
    });
}

std::vector<HostCache::Memory> HostCache::unpinned() const {
    const std::scoped_lock lock(mutex_);
    std::vector<Memory> memory;
    for (std::size_t i = 0; i < arenas_.size(); ++i) {
        if (!pins_.contains(i)) {
            memory.push_back({.index = i, .bytes = {arenas_[i].data(), arenas_[i].nbytes()}});
        }
    }
    return memory;
}

std::vector<std::unique_ptr<CachePin>>& HostCache::pins_of(std::size_t index, std::size_t count) {
    std::vector<std::unique_ptr<CachePin>> pins;
    pins.reserve(count);
    const std::scoped_lock lock(mutex_);
    return pins_.try_emplace(index, std::move(pins)).first->second;
}

std::uint64_t HostCache::epoch() const {
    const std::scoped_lock lock(mutex_);
    return epoch_;
}

void HostCache::interrupt() {
    const std::scoped_lock lock(mutex_);
    ++epoch_;
    for (Request* request : queue_) {
        if (request->use == Use::kStream) request->wake.notify_one();
    }
}

bool HostCache::is_lost(Share share) const {
    const std::scoped_lock lock(mutex_);
    const std::uint64_t left_for_saves = save_segments_ - lost_for_saves_;
    if (share == Share::kSave) return left_for_saves == 0;
    return left_for_saves <= kStreamReserve && lost_for_restores_ == slots_.size() - save_segments_;
}

Lease HostCache::acquire(Share share, std::uint64_t order, std::uint64_t epoch,
                         Clock::time_point deadline) {
    Request request;
    request.share = share;
    request.order = order;
    std::unique_lock lock(mutex_);
    if (epoch != epoch_) return {};
    enqueue(request);
    request.wake.wait_until(lock, deadline, [&] { return request.granted || epoch != epoch_; });
    if (!request.granted) {
        dequeue(request);
        return {};
    }
    return {shared_from_this(), *request.granted, slots_[*request.granted].data};
}

void HostCache::close() {
    const std::scoped_lock lock(mutex_);
    closed_ = true;
    for (Request* request : queue_) request->wake.notify_one();
}

CacheStats HostCache::stats() const {
    const std::scoped_lock lock(mutex_);
    return {.total_segments = slots_.size(),
            .free_segments = free_for_saves_.size() + free_for_restores_.size(),
            .slab_segments = slab_segments_,
            .waiting = queue_.size(),
            .peak_used_segments = peak_used_,
            .returned_segments = returned_};
}

void HostCache::enqueue(Request& request) {
    request.arrival = arrivals_++;
    queue_.insert(&request);
    request.queued = true;
    serve();
}

void HostCache::dequeue(Request& request) {
    if (!request.queued) return;
    queue_.erase(&request);
    request.queued = false;
    serve();  // others may have waited behind it
}

void HostCache::serve() {
    bool saves_wait = false;
    for (auto next = queue_.begin(); next != queue_.end();) {
        Request& request = **next;
        if (request.share == Share::kSave && saves_wait) {
            ++next;
            continue;
        }
        switch (try_grant(request)) {
            case Verdict::kGranted:
                request.queued = false;
                next = queue_.erase(next);
                request.wake.notify_one();
                break;
            case Verdict::kWaits:
                saves_wait = saves_wait || request.share == Share::kSave;
                ++next;
                break;
            case Verdict::kLetsOthersPass:
                ++next;
                break;
        }
    }
}

bool HostCache::saves_wait() const {
    return std::ranges::any_of(queue_,
                               [](const auto* each) { return each->share == Share::kSave; });
}

HostCache::Verdict HostCache::try_grant(Request& request) {
    if (request.use == Use::kStream) {
        const auto* free = &free_list(request.share);
        if (free->empty() && request.share == Share::kRestore && !saves_wait() &&
            free_for_saves_.size() > kStreamReserve) {
            free = &free_for_saves_;
        }
        if (free->empty()) return Verdict::kWaits;
        request.granted = free->back();
    } else {
        if (slab_segments_ + request.count + kStreamReserve > save_segments_ - lost_for_saves_) {
            return Verdict::kLetsOthersPass;
        }
        request.granted = find_run(request.count, [](Use use) { return use == Use::kFree; });
        if (!request.granted) {
            const bool drains = find_run(request.count, [](Use use) {
                                    return use == Use::kFree || use == Use::kStream;
                                }).has_value();
            return drains ? Verdict::kWaits : Verdict::kLetsOthersPass;
        }
    }
    mark(*request.granted, request.count, request.use);
    return Verdict::kGranted;
}

std::optional<std::uint32_t> HostCache::find_run(std::uint32_t count, bool (*fits)(Use)) const {
    std::uint32_t length = 0;
    for (std::uint32_t i = 0; i < slots_.size(); ++i) {
        const Slot& slot = slots_[i];
        const bool usable = slot.share == Share::kSave && fits(slot.use);
        const bool continues = i > 0 && slots_[i - 1].arena == slot.arena;
        if (!continues) length = 0;
        length = usable ? length + 1 : 0;
        if (length == count) return i + 1 - count;
    }
    return std::nullopt;
}

std::uint64_t HostCache::max_slab_bytes() const {
    const std::scoped_lock lock(mutex_);
    std::vector<std::uint64_t> per_arena(arenas_.size(), 0);
    for (const Slot& slot : slots_) per_arena[slot.arena] += slot.share == Share::kSave ? 1 : 0;
    const std::uint64_t longest = *std::ranges::max_element(per_arena);
    return std::min(longest, save_segments_ - kStreamReserve) * kSegmentBytes;
}

bool HostCache::can_ever_fit(std::uint32_t count) const {
    return count + kStreamReserve <= save_segments_ - lost_for_saves_ &&
           find_run(count, [](Use use) { return use != Use::kLost; });
}

void HostCache::mark(std::uint32_t first, std::uint32_t count, Use use) {
    auto& free = free_list(slots_[first].share);
    if (use == Use::kStream) {
        free.pop_back();
    } else {
        std::erase_if(free, [&](std::uint32_t i) { return i >= first && i < first + count; });
        slab_segments_ += count;
    }
    for (std::uint32_t i = first; i < first + count; ++i) slots_[i].use = use;
    slots_[first].count = count;
    const std::uint64_t used = slots_.size() - free_for_saves_.size() - free_for_restores_.size();
    peak_used_ = std::max(peak_used_, used);
}

std::vector<std::uint32_t>& HostCache::free_list(Share share) {
    return share == Share::kSave ? free_for_saves_ : free_for_restores_;
}

void HostCache::release(std::uint32_t first) {
    const std::scoped_lock lock(mutex_);
    const std::uint32_t count = slots_[first].count;
    if (slots_[first].use == Use::kSlab) slab_segments_ -= count;
    returned_ += count;
    for (std::uint32_t i = first; i < first + count; ++i) {
        slots_[i].use = Use::kFree;
        free_list(slots_[i].share).push_back(i);  // reserved when the slot was made
    }
    serve();
}

HostCache::SlabRequest::SlabRequest(std::shared_ptr<HostCache> cache, std::uint64_t nbytes,
                                    std::uint64_t order)
    : cache_(std::move(cache)) {
    const std::uint64_t segments = std::max<std::uint64_t>(1, divide_up(nbytes, kSegmentBytes));
    if (segments > std::numeric_limits<std::uint32_t>::max()) return;
    request_.order = order;
    request_.count = static_cast<std::uint32_t>(segments);
    request_.use = Use::kSlab;
    const std::scoped_lock lock(cache_->mutex_);
    fits_ = cache_->can_ever_fit(request_.count);
    if (fits_ && !cache_->closed_) cache_->enqueue(request_);
}

HostCache::SlabRequest::~SlabRequest() {
    {
        const std::scoped_lock lock(cache_->mutex_);
        cache_->dequeue(request_);
    }
    take().release();  // what was granted before that
}

HostCache::SlabRequest::State HostCache::SlabRequest::wait_until(Clock::time_point deadline) {
    std::unique_lock lock(cache_->mutex_);
    request_.wake.wait_until(lock, deadline, [&] {
        if (!request_.granted) fits_ = fits_ && cache_->can_ever_fit(request_.count);
        return request_.granted || !fits_ || cache_->closed_;
    });
    if (request_.granted) return State::kGranted;
    if (!fits_) return State::kNeverFits;
    return cache_->closed_ ? State::kClosed : State::kWaiting;
}

Lease HostCache::SlabRequest::take() {
    const std::scoped_lock lock(cache_->mutex_);
    if (!request_.granted) return {};
    const std::uint32_t first = *request_.granted;
    request_.granted.reset();
    return {cache_, first, cache_->slots_[first].data};
}

}  // namespace datastates
