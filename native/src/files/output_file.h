// A new file that is written past the page cache, and made durable.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "base/immovable.h"
#include "base/sizes.h"
#include "base/status.h"
#include "files/file_ops.h"

namespace datastates {

/// One file under construction; any thread may write any part. Uses O_DIRECT where the filesystem
/// takes it, and else the page cache, of which it then keeps little dirty.
class OutputFile : public Immovable {
  public:
    OutputFile(std::shared_ptr<FileOps> ops, std::string path, std::uint64_t nbytes);
    ~OutputFile() { abandon(); }

    /// Creates the file (it must not exist) and allocates its space. Only the first call does;
    /// others wait for it, or for `cancel`.
    Status ensure_open();

    /// The file is not needed any more: a thread that waits for another to open it returns. Does
    /// not block.
    void cancel();

    /// Writes whole multiples of kDirectAlignment at such an offset. What lies beyond the file's
    /// size is padding: it may reach storage, and `finish` cuts it off. The file is open.
    Status write(std::span<const std::byte> data, std::uint64_t offset);

    /// Cuts the file to its size, makes its bytes durable, closes it. No write is under way.
    Status finish();

    /// Closes the file as it is. No write is under way.
    void abandon();

    /// False once the file had to be written through the page cache.
    [[nodiscard]] bool direct() const { return direct_; }

  private:
    enum class Opening : std::uint8_t { kNotYet, kUnderWay, kTried };

    Status create();
    Status fall_back();
    Status limit_dirty(Range written);
    [[nodiscard]] Fault failed(const char* operation, int error, std::uint64_t offset) const;

    std::shared_ptr<FileOps> ops_;
    std::string path_;
    std::uint64_t nbytes_;
    std::mutex mutex_;  // guards what follows up to opened_, and behind_
    std::condition_variable opening_changed_;
    Opening opening_ = Opening::kNotYet;
    bool cancelled_ = false;
    Status opened_;  // when kTried
    std::atomic<int> fd_ = -1;
    std::atomic<bool> direct_ = true;
    std::deque<Range> behind_;  // buffered writes whose write-back was started, oldest first
};

/// Makes a directory's entries durable.
Status sync_directory(FileOps& ops, const std::string& path);

}  // namespace datastates
