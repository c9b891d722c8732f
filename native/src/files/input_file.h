// A file that is read past the page cache.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/immovable.h"
#include "base/status.h"
#include "files/file_ops.h"

namespace datastates {

/// Reads with O_DIRECT where the filesystem takes it. Any thread may read any part once it is open.
class InputFile : public Immovable {
  public:
    InputFile(std::shared_ptr<FileOps> ops, std::string path);
    ~InputFile();

    /// Opens it; a file that is not `nbytes` long is corrupt.
    Status open(std::uint64_t nbytes);

    /// Reads [offset, offset + nbytes) to `buffer`. `offset` and the memory are multiples of
    /// kDirectAlignment, and the buffer has room for `nbytes` rounded up to one.
    Status read(std::span<std::byte> buffer, std::uint64_t offset, std::uint64_t nbytes);

    /// Nothing closes it any more but the end of the process: it may take for ever. No thread
    /// reads.
    void leave_open() { fd_ = -1; }

  private:
    Status fall_back();

    std::shared_ptr<FileOps> ops_;
    std::string path_;
    int fd_ = -1;
    std::atomic<bool> direct_ = true;
};

}  // namespace datastates
