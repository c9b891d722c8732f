#include "memory/host_cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "check.h"
#include "support.h"

namespace datastates::testing {
namespace {

using State = HostCache::SlabRequest::State;

std::shared_ptr<HostCache> cache_of(std::uint64_t segments) {
    return std::make_shared<HostCache>(segments * kSegmentBytes);
}

void wait_for_waiters(const HostCache& cache, std::uint64_t count) {
    while (cache.stats().waiting != count) std::this_thread::yield();
}

Lease take(HostCache& cache, std::uint64_t order = 0) {
    return cache.acquire(Share::kSave, order, cache.epoch());
}

void counts_are_exact() {
    const auto cache = cache_of(16);
    check_equal(cache->stats().total_segments, 16U);
    check_equal(restore_share(16), 4U);
    std::vector<Lease> held;
    for (int i = 0; i < 5; ++i) held.push_back(take(*cache));
    HostCache::SlabRequest request(cache, 3 * kSegmentBytes - 5, 0);
    check(request.wait_until(Clock::now()) == State::kGranted);
    Lease slab = request.take();
    check_equal(cache->stats().free_segments, 8U);
    check_equal(cache->stats().slab_segments, 3U);
    slab.release();
    slab.release();
    held.clear();
    check_equal(cache->stats().free_segments, 16U);
    check_equal(cache->stats().slab_segments, 0U);
    check_equal(cache->stats().peak_used_segments, 8U);
}

void memory_used_last_is_used_first() {
    const auto cache = cache_of(16);
    std::byte* first = nullptr;
    for (int i = 0; i < 10; ++i) {
        const Lease lease = take(*cache);
        if (first == nullptr) first = lease.data();
        check(lease.data() == first);
    }
    check_equal(cache->stats().peak_used_segments, 1U);
}

void older_saves_go_first_then_arrival() {
    const auto cache = cache_of(4);  // three for saves
    std::vector<Lease> held;
    for (int i = 0; i < 3; ++i) held.push_back(take(*cache));
    std::mutex mutex;
    std::vector<int> served;
    std::vector<std::jthread> threads;
    const std::uint64_t epoch = cache->epoch();
    const std::vector<std::pair<std::uint64_t, int>> requests{{7, 2}, {5, 0}, {7, 3}, {6, 1}};
    for (const auto& [order, expected_turn] : requests) {
        const auto before = cache->stats().waiting;
        threads.emplace_back([&, order = order, turn = expected_turn] {
            const Lease lease = cache->acquire(Share::kSave, order, epoch);
            const std::scoped_lock lock(mutex);
            served.push_back(turn);
        });
        wait_for_waiters(*cache, before + 1);
    }
    held.pop_back();
    threads.clear();
    check(served == std::vector{0, 1, 2, 3});
}

void restores_and_saves_do_not_take_from_each_other() {
    const auto cache = cache_of(4);
    std::vector<Lease> held;
    for (int i = 0; i < 3; ++i) held.push_back(take(*cache));
    Lease restore = cache->acquire(Share::kRestore, 0, cache->epoch());
    check(static_cast<bool>(restore));
    std::jthread waiter([&] { check(!take(*cache)); });
    wait_for_waiters(*cache, 1);
    restore.release();
    check_equal(cache->stats().waiting, 1U);
    cache->interrupt();
}

void restores_borrow_what_saves_leave_free() {
    const auto cache = cache_of(8);
    check_equal(restore_share(8), 2U);
    std::vector<Lease> held;
    for (int i = 0; i < 6; ++i) {  // all but two
        held.push_back(cache->acquire(Share::kRestore, 0, cache->epoch()));
        check(static_cast<bool>(held.back()));
    }
    held.clear();
    check_equal(cache->stats().free_segments, 8U);
    for (int i = 0; i < 6; ++i) held.push_back(take(*cache));  // they are the saves' again
    check_equal(cache->stats().free_segments, 2U);
}

void restores_borrow_nothing_while_a_save_waits() {
    const auto cache = cache_of(7);  // six for saves
    std::vector<Lease> held;
    for (int i = 0; i < 6; ++i) held.push_back(take(*cache));
    const Lease own = cache->acquire(Share::kRestore, 0, cache->epoch());
    const std::uint64_t epoch = cache->epoch();
    Lease restored;
    Lease saved;
    std::jthread restore([&] { restored = cache->acquire(Share::kRestore, 0, epoch); });
    wait_for_waiters(*cache, 1);
    std::jthread save([&] { saved = cache->acquire(Share::kSave, 9, epoch); });
    wait_for_waiters(*cache, 2);
    held.pop_back();
    save.join();
    check(static_cast<bool>(saved));
    check_equal(cache->stats().waiting, 1U);  // the restore, which came first
    held.pop_back();
    held.pop_back();
    check_equal(cache->stats().waiting, 1U);  // two are left to saves
    held.pop_back();
    restore.join();
    check(static_cast<bool>(restored));
}

void pages_are_touched_and_keep_their_bytes() {
    const Arena arena(kSegmentBytes);
    std::byte* const data = arena.data();
    data[0] = data[4096] = std::byte{7};
    touch_pages({data, kSegmentBytes});
    std::vector<unsigned char> resident(kSegmentBytes / 4096);
    check_equal(mincore(data, kSegmentBytes, resident.data()), 0);
    check(std::ranges::all_of(resident, [](unsigned char each) { return (each & 1U) != 0; }));
    for (std::uint64_t at = 0; at < kSegmentBytes; at += 4096) {
        check(data[at] == (at <= 4096 ? std::byte{7} : std::byte{0}));
    }
}

void an_interrupt_ends_waits_and_old_epochs() {
    const auto cache = cache_of(4);
    std::vector<Lease> held;
    for (int i = 0; i < 3; ++i) held.push_back(take(*cache));
    const std::uint64_t epoch = cache->epoch();
    std::jthread waiter([&] { check(!cache->acquire(Share::kSave, 0, epoch)); });
    wait_for_waiters(*cache, 1);
    cache->interrupt();
    waiter.join();
    held.clear();
    check(!cache->acquire(Share::kSave, 0, epoch));
    check_equal(cache->stats().waiting, 0U);
    check_equal(cache->stats().free_segments, 4U);
}

void slabs_leave_two_segments() {
    const auto cache = cache_of(8);  // six for saves
    HostCache::SlabRequest too_large(cache, 5 * kSegmentBytes, 0);
    check(too_large.wait_until(in(10)) == State::kNeverFits);
    HostCache::SlabRequest fits(cache, 4 * kSegmentBytes, 0);
    check(fits.wait_until(Clock::now()) == State::kGranted);
    HostCache::SlabRequest more(cache, 1, 0);
    check(more.wait_until(in(0.01)) == State::kWaiting);
    check(static_cast<bool>(take(*cache, 9)));  // streams pass
    fits.take().release();
    check(more.wait_until(in(1)) == State::kGranted);
}

void a_slab_waits_behind_older_saves_and_before_newer_ones() {
    const auto cache = cache_of(4);  // three for saves, a slab of one at most
    std::vector<Lease> held;
    for (int i = 0; i < 3; ++i) held.push_back(take(*cache));
    HostCache::SlabRequest slab(cache, kSegmentBytes, 5);
    check(slab.wait_until(Clock::now()) == State::kWaiting);
    std::atomic<bool> older = false;
    std::atomic<bool> newer = false;
    std::jthread old_save([&] {
        const Lease lease = take(*cache, 4);
        older = true;
        check(slab.wait_until(Clock::now()) == State::kWaiting);
    });
    wait_for_waiters(*cache, 2);
    std::jthread new_save([&] {
        const Lease lease = take(*cache, 6);
        newer = true;
    });
    wait_for_waiters(*cache, 3);
    held.pop_back();
    old_save.join();
    check(slab.wait_until(in(10)) == State::kGranted);
    check(older);
    check(!newer);
    held.pop_back();
    new_save.join();
}

void a_slab_that_waits_for_slabs_lets_newer_streams_pass() {
    const auto cache = cache_of(4);
    HostCache::SlabRequest newer(cache, kSegmentBytes, 9);
    check(newer.wait_until(Clock::now()) == State::kGranted);
    HostCache::SlabRequest older(cache, kSegmentBytes, 1);
    check(older.wait_until(Clock::now()) == State::kWaiting);
    // The newer save must be able to run, or its slab would never be freed.
    {
        const Lease lease = take(*cache, 9);
    }
    newer.take().release();
    check(older.wait_until(Clock::now()) == State::kGranted);
}

void slabs_are_contiguous_and_survive_their_request() {
    const auto cache = cache_of(16);  // twelve for saves
    std::vector<Lease> singles;
    for (int i = 0; i < 12; ++i) singles.push_back(take(*cache));
    std::ranges::sort(singles, {}, &Lease::data);
    for (int i = 0; i < 12; i += 2) singles[static_cast<std::size_t>(i)].release();
    HostCache::SlabRequest request(cache, 2 * kSegmentBytes, 0);
    check(request.wait_until(in(0.01)) == State::kWaiting);  // six free, no two together
    singles[5].release();
    check(request.wait_until(Clock::now()) == State::kGranted);
    const Lease slab = request.take();
    check(!request.take());
    std::fill_n(slab.data(), 2 * kSegmentBytes, std::byte{1});
    HostCache::SlabRequest abandoned(cache, kSegmentBytes, 0);  // granted, and never taken
}

void growing_serves_waiters() {
    const auto cache = cache_of(4);
    std::vector<Lease> held;
    for (int i = 0; i < 3; ++i) held.push_back(take(*cache));
    std::jthread waiter([&] { check(static_cast<bool>(take(*cache))); });
    wait_for_waiters(*cache, 1);
    cache->grow(8 * kSegmentBytes);
    waiter.join();
    check_equal(cache->stats().total_segments, 8U);
    cache->grow(kSegmentBytes);
    check_equal(cache->stats().total_segments, 8U);
    std::vector<Lease> restores;
    for (int i = 0; i < 2; ++i) {
        restores.push_back(cache->acquire(Share::kRestore, 0, cache->epoch()));
    }
    check_equal(cache->stats().free_segments, 3U);
}

void closing_refuses_slabs() {
    const auto cache = cache_of(4);
    std::vector<Lease> held;
    for (int i = 0; i < 3; ++i) held.push_back(take(*cache));
    HostCache::SlabRequest request(cache, 1, 0);
    std::jthread waiter([&] { check(request.wait_until(in(60)) == State::kClosed); });
    wait_for_waiters(*cache, 1);
    cache->close();
    waiter.join();
    HostCache::SlabRequest later(cache, 1, 0);
    check(later.wait_until(in(60)) == State::kClosed);
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<
        counts_are_exact, memory_used_last_is_used_first, older_saves_go_first_then_arrival,
        restores_and_saves_do_not_take_from_each_other, restores_borrow_what_saves_leave_free,
        restores_borrow_nothing_while_a_save_waits, pages_are_touched_and_keep_their_bytes,
        an_interrupt_ends_waits_and_old_epochs, slabs_leave_two_segments,
        a_slab_waits_behind_older_saves_and_before_newer_ones,
        a_slab_that_waits_for_slabs_lets_newer_streams_pass,
        slabs_are_contiguous_and_survive_their_request, growing_serves_waiters,
        closing_refuses_slabs>();
}
