#include "scheduler.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace datastates::fake_cuda {
namespace {

constexpr std::size_t kThreads = 8;  // kernels may wait for each other's effects

/// For what is not aligned.
struct [[gnu::packed, gnu::may_alias]] Word {
    std::uint64_t value;
};

/// As a device copies: ThreadSanitizer neither sees these accesses nor believes that they order
/// anything. Volatile, or it became a call of memcpy, which is seen.
[[gnu::no_sanitize("thread")]] void copy_unseen(std::byte* to, const std::byte* from,
                                                std::uint64_t nbytes) {
    for (; nbytes >= sizeof(Word); nbytes -= sizeof(Word)) {
        reinterpret_cast<volatile Word*>(to)->value =
            reinterpret_cast<const volatile Word*>(from)->value;
        to += sizeof(Word);
        from += sizeof(Word);
    }
    for (; nbytes > 0; --nbytes) {
        *const_cast<volatile std::byte*>(to) = *const_cast<const volatile std::byte*>(from);
        ++to;
        ++from;
    }
}

}  // namespace

void Scheduler::set(const Manners& manners) {
    if (manners.seed != manners_.seed) random_.seed(manners.seed);
    manners_ = manners;
}

void Scheduler::submit(const WorkPointer& work, std::span<const WorkPointer> leaders) {
    start();
    work->number = ++submitted_;
    for (const WorkPointer& leader : leaders) {
        if (leader == nullptr || leader->done) continue;
        leader->followers.push_back(work);
        ++work->blockers;
    }
    pending_.emplace(work->number, work);
    Queue& queue = queues_[work->device];
    (work->engines ? queue.engine : queue.training) += work->commands();
    queue.most_of_engine = std::max(queue.most_of_engine, queue.engine);
    if (work->engines) queue.engine_bytes += work->nbytes();
    queue.most_engine_bytes = std::max(queue.most_engine_bytes, queue.engine_bytes);
    if (work->blockers > 0) return;
    ready_.push_back(work);
    may_run_.notify_all();
}

bool Scheduler::wait_until(std::unique_lock<std::mutex>& lock, const WorkPointer& work,
                           Clock::time_point deadline) {
    if (work == nullptr) return true;
    const std::uint64_t stops = stops_;
    finished_.wait_until(lock, deadline, [&] { return work->done || stops_ != stops; });
    return work->done;
}

bool Scheduler::wait_all_until(std::unique_lock<std::mutex>& lock, Clock::time_point deadline) {
    return finished_.wait_until(lock, deadline, [&] { return pending_.empty(); });
}

void Scheduler::wait_for_queue(std::unique_lock<std::mutex>& lock, int device,
                               const std::function<bool(const Queue&)>& so) {
    const std::uint64_t stops = stops_;
    finished_.wait(lock, [&] { return so(queues_[device]) || stops_ != stops; });
}

void Scheduler::stall(bool on) {
    stalled_ = on;
    may_run_.notify_all();
}

void Scheduler::drop_all() {
    dropped_up_to_ = submitted_;
    may_run_.notify_all();
}

void Scheduler::stop(std::unique_lock<std::mutex>& lock) {
    stopping_ = true;
    may_run_.notify_all();
    auto threads = std::exchange(threads_, {});
    lock.unlock();
    threads.clear();
    lock.lock();
    stopping_ = false;
    stalled_ = false;
    ++stops_;
    ready_.clear();
    for (auto& [number, work] : pending_) work->followers.clear();  // or they end recursively
    pending_.clear();
    queues_.clear();
    engines_.clear();
    finished_.notify_all();
}

void Scheduler::start() {
    if (!threads_.empty()) return;
    for (std::size_t n = 0; n < kThreads; ++n) threads_.emplace_back([this] { run(); });
}

void Scheduler::run() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
        const WorkPointer work = stalled_ ? nullptr : take_any();
        if (work == nullptr) {
            may_run_.wait(lock);
            continue;
        }
        perform(lock, *work);
        if (CopyEngine* const used = copy_engine(*work)) used->busy = false;
        finish(*work);
    }
}

/// Null: it needs none.
Scheduler::CopyEngine* Scheduler::copy_engine(const Work& work) {
    if (!use_engines_ || work.direction < 0) return nullptr;
    return &engines_[{work.device, work.direction}];
}

/// To another stream only where the one before has run dry: the events between its copies are done
/// before that, and what waits for another stream is not.
bool Scheduler::may_turn(const CopyEngine& engine, const Work& work) const {
    return work.stream == engine.stream || std::ranges::none_of(pending_, [&](const auto& each) {
               const Work& other = *each.second;
               return other.stream == engine.stream && other.blockers == 0 && !other.kernel;
           });
}

/// Null: nothing that is ready has an engine that is free.
WorkPointer Scheduler::take_any() {
    std::vector<std::size_t> may;
    for (std::size_t at = 0; at < ready_.size(); ++at) {
        const CopyEngine* const engine = copy_engine(*ready_[at]);
        const bool free = engine == nullptr || (!engine->busy && may_turn(*engine, *ready_[at]));
        if (free) may.push_back(at);
    }
    if (may.empty()) return nullptr;
    std::size_t chosen = may[below(may.size())];
    if (CopyEngine* const engine = copy_engine(*ready_[chosen])) {
        for (const std::size_t at : may) {
            const Work& other = *ready_[at];
            if (copy_engine(other) == engine && other.stream == engine->stream) chosen = at;
        }
        engine->busy = true;
        engine->stream = ready_[chosen]->stream;
    }
    std::swap(ready_[chosen], ready_.back());
    WorkPointer work = std::move(ready_.back());
    ready_.pop_back();
    return work;
}

void Scheduler::perform(std::unique_lock<std::mutex>& lock, Work& work) {
    if (is_dropped(work)) return;
    pause(lock, 2);
    if (is_dropped(work)) return;
    if (work.kernel) {
        lock.unlock();
        work.kernel();
        lock.lock();
    }
    std::ranges::shuffle(work.copies, random_);
    for (const Piecewise& each : work.copies) copy(lock, work, each);
}

void Scheduler::copy(std::unique_lock<std::mutex>& lock, const Work& work, const Piecewise& copy) {
    for (std::uint64_t begin = 0; begin < copy.nbytes;) {
        if (is_dropped(work)) return;
        const std::uint64_t size = std::min(manners_.piece_nbytes, copy.nbytes - begin);
        const bool seen = manners_.show_accesses;
        lock.unlock();
        if (seen) {
            std::memcpy(copy.to + begin, copy.from + begin, size);
        } else {
            copy_unseen(copy.to + begin, copy.from + begin, size);
        }
        lock.lock();
        begin += size;
        if (begin < copy.nbytes) pause(lock, 8);
    }
}

void Scheduler::finish(Work& work) {
    if (stopping_) return;  // neither done nor ever to be
    work.done = true;
    work.done_at = Clock::now();
    Queue& queue = queues_[work.device];
    (work.engines ? queue.engine : queue.training) -= work.commands();
    if (work.engines) queue.engine_bytes -= work.nbytes();
    if (work.when_finished) work.when_finished();
    work.kernel = nullptr;  // streams and events may keep this
    work.copies = {};
    work.written = {};
    work.when_finished = nullptr;
    for (const WorkPointer& follower : std::exchange(work.followers, {})) {
        if (--follower->blockers == 0) ready_.push_back(follower);
    }
    pending_.erase(work.number);
    may_run_.notify_all();
    finished_.notify_all();
}

/// Waits for a random time, one time in `one_in`; and for the end of a stall.
void Scheduler::pause(std::unique_lock<std::mutex>& lock, std::uint64_t one_in) {
    const auto longest = static_cast<std::uint64_t>(manners_.max_delay.count());
    if (longest > 0 && below(one_in) == 0) {
        const auto end = Clock::now() + std::chrono::microseconds(below(longest + 1));
        may_run_.wait_until(lock, end, [this] { return stopping_; });
    }
    may_run_.wait(lock, [this] { return !stalled_ || stopping_; });
}

std::uint64_t Scheduler::below(std::uint64_t bound) {
    return std::uniform_int_distribution<std::uint64_t>(0, bound - 1)(random_);
}

}  // namespace datastates::fake_cuda
