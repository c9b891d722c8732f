// The host cache: all memory that saves and restores pass through, in segments of equal size.
//
// Who gets a segment, and why nothing deadlocks:
//   - Restores have a share of their own (`restore_share`), so they go on whatever saves hold.
//   Saves
//     use the rest, of which restores borrow what is free while no save waits, but for
//     `kStreamReserve` segments: what a restore holds may be slow to come back.
//   - Waiting requests of saves are served in the order of their saves, then of their arrival.
//   - A segment of a stream is always given back without the help of another one: what holds it is
//     being read, checksummed, written or copied, or waits until it is known where its save goes
//     (which needs no segments of that save or a newer one: save_pipeline.h), or until the caller
//     has sent it (which needs no segments but those of older parts of that save). That holds for
//     what a restore borrows, too; a segment that the caller fills takes no other one.
//   - A slab may be held for long (until its save's reads are done, which take segments), so slabs
//     in total leave `kStreamReserve` segments to the streams; and a slab that waits for other
//     slabs lets newer requests pass, while one that waits only for streams to drain does not.

#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/immovable.h"
#include "base/sizes.h"
#include "memory/arena.h"

namespace datastates {

class HostCache;

/// What keeps a part of the cache's memory pinned, as long as it lives.
class CachePin : public Immovable {
  public:
    virtual ~CachePin() = default;
};

/// Segments held: given back with the object. Keeps the cache's memory alive.
class Lease {
  public:
    Lease() = default;
    Lease(std::shared_ptr<HostCache> cache, std::uint32_t first, std::byte* data);
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Lease(Lease&& other) noexcept;
    Lease& operator=(Lease&& other) noexcept;
    ~Lease() { release(); }

    void release();
    /// For memory that a hanging device may still use: it is never given back, so never used again
    /// nor unmapped, and what pins it stays. Cannot fail.
    void abandon();
    [[nodiscard]] std::byte* data() const { return data_; }
    explicit operator bool() const { return data_ != nullptr; }

  private:
    std::shared_ptr<HostCache> cache_;
    std::uint32_t first_ = 0;
    std::byte* data_ = nullptr;
};

struct CacheStats {
    std::uint64_t total_segments = 0;
    std::uint64_t free_segments = 0;
    std::uint64_t slab_segments = 0;
    std::uint64_t waiting = 0;
    std::uint64_t peak_used_segments = 0;
    std::uint64_t returned_segments = 0;  // so far: it grows while anything goes on
};

/// Whose segments: those that saves use, or those that restores use.
enum class Share : std::uint8_t { kSave, kRestore };

class HostCache : public std::enable_shared_from_this<HostCache> {
  public:
    /// Holds as many whole segments as fit into `nbytes`. Throws std::bad_alloc.
    explicit HostCache(std::uint64_t nbytes);

    /// Adds segments until `nbytes` in all. Throws std::bad_alloc, and is then unchanged.
    void grow(std::uint64_t nbytes);

    /// Changes with each `interrupt`. Read it before looking at what `interrupt` announces.
    [[nodiscard]] std::uint64_t epoch() const;

    /// Makes every `acquire` that was given an older epoch return: its caller looks around anew. So
    /// does a lease that is abandoned.
    void interrupt();

    /// Whether all segments that a share may use were abandoned: `acquire` would wait for ever.
    [[nodiscard]] bool is_lost(Share share) const;

    /// One segment; waits for its turn. Empty if interrupted, or after `deadline`.
    Lease acquire(Share share, std::uint64_t order, std::uint64_t epoch,
                  Clock::time_point deadline = Clock::time_point::max());

    /// Refuses all slabs from now on, also those that are waited for.
    void close();

    [[nodiscard]] CacheStats stats() const;

    /// The memory is never unmapped nor unpinned from now on: the process ends, and unpinning would
    /// wait for a device that hangs. Cannot fail.
    void keep();

    /// The largest slab that an idle cache could give.
    [[nodiscard]] std::uint64_t max_slab_bytes() const;

    /// A part of the cache's memory. It never moves.
    struct Memory {
        std::size_t index = 0;
        std::span<std::byte> bytes;
    };
    /// Whether this is memory of the cache.
    [[nodiscard]] bool has(const std::byte* data) const;

    /// What `pins_of` was not called for.
    [[nodiscard]] std::vector<Memory> unpinned() const;
    /// Where to keep up to `count` pins, without fail, until just before that memory is unmapped.
    /// For one thread.
    std::vector<std::unique_ptr<CachePin>>& pins_of(std::size_t index, std::size_t count);

    class SlabRequest;

  private:
    friend class Lease;

    enum class Use : std::uint8_t { kFree, kStream, kSlab, kLost };

    struct Slot {
        std::byte* data = nullptr;
        std::size_t arena = 0;
        Share share = Share::kSave;
        Use use = Use::kFree;
        std::uint32_t count = 1;  // of the lease that begins here
    };

    /// A place in the queue. Lives with the thread that waits; all of it is guarded by mutex_.
    struct Request {
        Share share = Share::kSave;
        std::uint64_t order = 0;
        std::uint64_t arrival = 0;
        std::uint32_t count = 1;
        Use use = Use::kStream;
        bool queued = false;
        std::optional<std::uint32_t> granted;
        std::condition_variable wake;  // when granted, interrupted or closed
    };

    struct Turn {
        bool operator()(const Request* a, const Request* b) const {
            return a->order != b->order ? a->order < b->order : a->arrival < b->arrival;
        }
    };

    enum class Verdict : std::uint8_t { kGranted, kWaits, kLetsOthersPass };

    // All of these are called with mutex_ held.
    void add_arena(Arena arena, std::uint64_t segments);
    void enqueue(Request& request);
    void dequeue(Request& request);
    void serve();
    Verdict try_grant(Request& request);
    bool saves_wait() const;
    std::optional<std::uint32_t> find_run(std::uint32_t count, bool (*fits)(Use)) const;
    bool can_ever_fit(std::uint32_t count) const;
    void mark(std::uint32_t first, std::uint32_t count, Use use);
    std::vector<std::uint32_t>& free_list(Share share);

    void release(std::uint32_t first);
    void abandon(std::uint32_t first);

    mutable std::mutex mutex_;   // guards all that follows
    std::vector<Arena> arenas_;  // unmapped with the cache, which leases keep alive
    std::map<std::size_t, std::vector<std::unique_ptr<CachePin>>> pins_;  // by arena
    std::vector<Slot> slots_;                       // in each arena: for saves first, then restores
    std::vector<std::uint32_t> free_for_saves_;     // stacks: what was used last is used next, so a
    std::vector<std::uint32_t> free_for_restores_;  // small job touches little memory
    std::set<Request*, Turn> queue_;
    std::uint64_t save_segments_ = 0;
    std::uint64_t lost_for_saves_ = 0;  // of those; abandoned
    std::uint64_t lost_for_restores_ = 0;
    std::uint64_t slab_segments_ = 0;
    std::uint64_t peak_used_ = 0;
    std::uint64_t returned_ = 0;
    std::uint64_t arrivals_ = 0;
    std::uint64_t epoch_ = 0;
    bool closed_ = false;
    std::shared_ptr<HostCache> self_;  // once kept
    HostCache* next_kept_ = nullptr;   // of the caches that have such
};

/// A request for contiguous segments that keeps its place in the queue while its caller does
/// something else between two waits.
class HostCache::SlabRequest : public Immovable {
  public:
    SlabRequest(std::shared_ptr<HostCache> cache, std::uint64_t nbytes, std::uint64_t order);
    ~SlabRequest();

    enum class State : std::uint8_t { kGranted, kWaiting, kNeverFits, kClosed };

    State wait_until(Clock::time_point deadline);

    /// The slab, once granted.
    Lease take();

  private:
    std::shared_ptr<HostCache> cache_;
    Request request_;
    bool fits_ = false;
};

/// Segments that only restores use, of a cache of `total`.
std::uint64_t restore_share(std::uint64_t total);

}  // namespace datastates
