// Pins the host cache in the background: what is waited for first, piece by piece.
//
// Pinning takes the driver's lock, for which each launch of a kernel waits. So pages are faulted in
// before, without the driver, near the device; and the thread pauses after each piece as long as
// the piece took.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>

#include "base/immovable.h"
#include "base/patience.h"
#include "device/device.h"
#include "memory/host_cache.h"

namespace datastates {

class Pinner : public Immovable {
  public:
    Pinner(std::shared_ptr<HostCache> cache, const Patience& patience)
        : cache_(std::move(cache)), patience_(patience) {}
    ~Pinner() { shutdown(); }

    /// Begins to pin, through `device`; nothing if it has begun. Throws std::system_error.
    void start(const std::shared_ptr<Device>& device);

    /// Grows the cache, and pins the new memory too, once started. Throws what that throws.
    void grow(std::uint64_t nbytes);

    /// False while something is still to be pinned.
    [[nodiscard]] bool idle() const;

    [[nodiscard]] std::uint64_t pinned_bytes() const { return pinned_bytes_; }
    /// Why some memory is not pinned.
    [[nodiscard]] std::optional<Fault> fault() const;
    /// Why memory may lie far from the device.
    [[nodiscard]] std::optional<Fault> node_fault() const;

    /// Waits until this memory is pinned, if it is the cache's and is going to be. A fault:
    /// patience is over, or `shutdown` came first.
    Status wait(const std::byte* data, std::uint64_t nbytes);

    /// Joins the thread. What is pinned stays so, until the cache goes.
    void shutdown();

  private:
    using Bytes = std::span<const std::byte>;

    struct Piece {
        std::size_t arena = 0;
        std::span<std::byte> bytes;
    };

    // These are called with mutex_ held.
    [[nodiscard]] bool is_idle() const;
    [[nodiscard]] const std::byte* first_unpinned(Bytes memory) const;
    void find_pieces();
    Piece take_piece();
    void give_up(Fault fault);

    void loop();
    Status pin(const Piece& piece);

    const std::shared_ptr<HostCache> cache_;
    const Patience& patience_;
    Clock::time_point next_;  // the thread's: when the driver's lock may be taken again

    mutable std::mutex mutex_;         // guards what follows; taken before the cache's
    std::shared_ptr<Device> device_;   // null: not started
    std::condition_variable wanted_;   // of the thread: device_, look_, stopping_
    std::condition_variable changed_;  // of those who wait: pinned_, fault_, is_idle, stopping_
    std::list<Bytes> waited_for_;      // one for each thread in `wait`
    std::map<const std::byte*, Piece> pieces_;          // to be pinned, by where they begin
    std::map<const std::byte*, std::uint64_t> pinned_;  // bytes, by where they begin
    bool look_ = true;      // there may be memory that is in no piece yet
    bool pinning_ = false;  // a piece is in hand
    bool stopping_ = false;
    std::optional<Fault> fault_;
    std::optional<Fault> node_fault_;
    std::jthread thread_;  // ends when stopping_; joined by `shutdown`
    std::atomic<std::uint64_t> pinned_bytes_ = 0;
};

}  // namespace datastates
