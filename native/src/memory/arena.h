// A large anonymous mapping for host cache segments.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"

namespace datastates {

/// Zeroed memory, aligned to huge pages, backed lazily. Not inherited by forked children: O_DIRECT
/// on memory that a fork shares copy-on-write corrupts (open(2), NOTES).
class Arena {
  public:
    /// Throws std::bad_alloc if the memory cannot be mapped.
    explicit Arena(std::uint64_t nbytes);
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    Arena(Arena&& other) noexcept;
    Arena& operator=(Arena&&) = delete;
    ~Arena();

    [[nodiscard]] std::byte* data() const { return data_; }
    [[nodiscard]] std::uint64_t nbytes() const { return nbytes_; }

  private:
    std::byte* data_ = nullptr;
    std::uint64_t nbytes_ = 0;
};

/// Faults pages in, as pinning would. Leaves the bytes alone, which other threads may use.
void fault_in(std::span<std::byte> memory);
/// The same for kernels before Linux 5.14, page by page.
void touch_pages(std::span<std::byte> memory);

/// Pages that the calling thread faults in come from this NUMA node of the host, if it has room.
/// Does nothing for -1. Where the system forbids to say so (containers do), the thread runs on the
/// node's CPUs from now on, as pages come from the node of the CPU otherwise; the fault says that.
Status prefer_node(int node);

}  // namespace datastates
