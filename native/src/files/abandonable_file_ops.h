// File operations that can be given up: at the end of the process one may never return, because the
// server or the device behind the file is dead.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/fault.h"
#include "base/patience.h"
#include "files/file_ops.h"

namespace datastates {

/// The operations of another FileOps. A thread in one that is given up is lost: should the system
/// answer after all, the thread sleeps until the process ends, and touches nothing any more. What
/// it has on its stack is never destroyed, so what it shares by shared_ptr stays alive, and a lease
/// of its own stays taken. Who owns the thread detaches it.
class AbandonableFileOps final : public FileOps {
  public:
    /// An operation is given `patience` when the end comes.
    AbandonableFileOps(std::shared_ptr<FileOps> inner, Clock::duration patience)
        : inner_(std::move(inner)), patience_(patience) {}

    /// The engine is being shut down: all operations end in time. Only the first call counts.
    void begin_shutdown() { patience_.begin(); }

    /// The process is about to end: from now on each operation ends in time, and others may follow.
    /// Only the first call counts.
    void limit_patience() { patience_.limit(); }

    /// Gives up the operation that `thread` is in, if patience is over for it; returns what is to
    /// be said of it. Any thread. Throws std::bad_alloc, and has then given up nothing.
    std::optional<Fault> abandon(std::thread::id thread);

    /// All that was given up until now.
    [[nodiscard]] std::vector<Fault> abandoned() const;

    SysResult open(const std::string& path, int flags, mode_t mode) override;
    SysResult set_direct(int fd, bool direct) override;
    SysResult size(int fd) override;
    SysResult allocate(int fd, std::uint64_t nbytes) override;
    SysResult write(int fd, std::span<const std::byte> data, std::uint64_t offset) override;
    SysResult read(int fd, std::span<std::byte> data, std::uint64_t offset) override;
    SysResult read_cached(int fd, std::span<std::byte> data, std::uint64_t offset) override;
    SysResult start_writeback(int fd, Range range) override;
    SysResult wait_writeback(int fd, Range range) override;
    SysResult drop_cached(int fd, Range range) override;
    SysResult truncate(int fd, std::uint64_t nbytes) override;
    SysResult sync_data(int fd) override;
    SysResult sync(int fd) override;
    SysResult close(int fd) override;
    // Memory, not files: who frees the sources waits for these.
    SysResult gather_begins() override { return inner_->gather_begins(); }
    SysResult gather_ended() override { return inner_->gather_ended(); }

  private:
    class Call;

    template <typename Operation>
    SysResult during(const char* name, int fd, const Operation& operation);
    [[nodiscard]] const std::string& path_of(int fd) const;

    const std::shared_ptr<FileOps> inner_;
    const std::string no_path_;
    Patience patience_;
    mutable std::mutex mutex_;          // guards what follows; not held during an operation
    std::map<int, std::string> paths_;  // of open files
    Call* calls_ = nullptr;             // under way, but for those given up; a list without memory
    std::vector<Fault> abandoned_;
};

}  // namespace datastates
