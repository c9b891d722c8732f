// Every file operation of the engine, behind one interface: so that tests can watch and break them.

#pragma once

#include <sys/types.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/immovable.h"
#include "base/sizes.h"

namespace datastates {

/// What a system call returned: a value, or the error number.
struct SysResult {
    std::int64_t value = 0;
    int error = 0;

    [[nodiscard]] bool ok() const { return error == 0; }
};

/// The system calls, one to one. May return EINTR and short counts. Any thread.
class FileOps : public Immovable {
  public:
    virtual ~FileOps() = default;

    virtual SysResult open(const std::string& path, int flags, mode_t mode) = 0;
    /// Sets or clears O_DIRECT on an open file.
    virtual SysResult set_direct(int fd, bool direct) = 0;
    virtual SysResult size(int fd) = 0;
    /// fallocate(2) from offset 0, the file's size included; never the C library's emulation.
    virtual SysResult allocate(int fd, std::uint64_t nbytes) = 0;
    virtual SysResult write(int fd, std::span<const std::byte> data, std::uint64_t offset) = 0;
    virtual SysResult read(int fd, std::span<std::byte> data, std::uint64_t offset) = 0;
    /// Reads what the page cache has of it, without waiting: EAGAIN if it does not begin there.
    virtual SysResult read_cached(int fd, std::span<std::byte> data, std::uint64_t offset) {
        static_cast<void>(fd), static_cast<void>(data), static_cast<void>(offset);
        return {.value = -1, .error = EAGAIN};
    }
    /// Starts to write a range of the page cache back, without waiting.
    virtual SysResult start_writeback(int fd, Range range) = 0;
    /// Waits until a range is written back.
    virtual SysResult wait_writeback(int fd, Range range) = 0;
    /// Advises that a range is not needed in the page cache.
    virtual SysResult drop_cached(int fd, Range range) = 0;
    virtual SysResult truncate(int fd, std::uint64_t nbytes) = 0;
    virtual SysResult sync_data(int fd) = 0;
    virtual SysResult sync(int fd) = 0;
    virtual SysResult close(int fd) = 0;

    /// No calls to the system: a copy thread is about to gather sources into a segment, or has done
    /// so. For who watches; the job fails with the error that it answers.
    virtual SysResult gather_begins() { return {}; }
    virtual SysResult gather_ended() { return {}; }
};

std::shared_ptr<FileOps> posix_file_ops();

/// Whether a file system answers so to what it does not have.
constexpr bool is_unsupported(int error) {
    return error == EOPNOTSUPP || error == ENOSYS || error == EINVAL;
}

/// Repeats `call` as long as a signal interrupts it.
template <typename Call>
SysResult uninterrupted(const Call& call) {
    SysResult result = call();
    while (result.error == EINTR) result = call();
    return result;
}

}  // namespace datastates
