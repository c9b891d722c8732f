// A file that is read from the page cache if it is there, and past it otherwise.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "base/immovable.h"
#include "base/status.h"
#include "files/file_ops.h"

namespace datastates {

/// Reads what the page cache has; from the first part on that it does not have, reads with O_DIRECT
/// where the filesystem takes it. Any thread may read any part once it is open.
class InputFile : public Immovable {
  public:
    InputFile(std::shared_ptr<FileOps> ops, std::string path);
    ~InputFile();

    /// Opens it; a file that is not `nbytes` long is corrupt.
    Status open(std::uint64_t nbytes);

    /// Reads [offset, offset + nbytes) to `buffer`. `offset` and the memory are multiples of
    /// kDirectAlignment, and the buffer has room for `nbytes` rounded up to one.
    Status read(std::span<std::byte> buffer, std::uint64_t offset, std::uint64_t nbytes);

    /// Whether the page cache has had all that was read so far.
    [[nodiscard]] bool is_cached() const { return way_ == Way::kCached; }

  private:
    enum class Way : std::uint8_t { kCached, kDirect, kBuffered };

    void leave_cache();
    Status leave_direct();

    std::shared_ptr<FileOps> ops_;
    std::string path_;
    int fd_ = -1;
    std::mutex switching_;  // leaves kCached once
    std::atomic<Way> way_ = Way::kCached;
};

}  // namespace datastates
