#include "files/file_ops.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

namespace datastates {
namespace {

SysResult result_of(std::int64_t value) {
    if (value < 0) return {.value = value, .error = errno};
    return {.value = value, .error = 0};
}

off_t file_offset(std::uint64_t offset) {
    return static_cast<off_t>(offset);
}

class PosixFileOps final : public FileOps {
  public:
    SysResult open(const std::string& path, int flags, mode_t mode) override {
        return result_of(::open(path.c_str(), flags, mode));
    }

    SysResult set_direct(int fd, bool direct) override {
        const int flags = ::fcntl(fd, F_GETFL);
        if (flags < 0) return result_of(flags);
        return result_of(::fcntl(fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT));
    }

    SysResult size(int fd) override {
        struct stat status{};
        const int failed = ::fstat(fd, &status);
        return failed != 0 ? result_of(failed) : result_of(status.st_size);
    }

    SysResult allocate(int fd, std::uint64_t nbytes) override {
        return result_of(::fallocate(fd, 0, 0, file_offset(nbytes)));
    }

    SysResult write(int fd, std::span<const std::byte> data, std::uint64_t offset) override {
        return result_of(::pwrite(fd, data.data(), data.size(), file_offset(offset)));
    }

    SysResult read(int fd, std::span<std::byte> data, std::uint64_t offset) override {
        return result_of(::pread(fd, data.data(), data.size(), file_offset(offset)));
    }

    SysResult read_cached(int fd, std::span<std::byte> data, std::uint64_t offset) override {
        const iovec part{.iov_base = data.data(), .iov_len = data.size()};
        return result_of(::preadv2(fd, &part, 1, file_offset(offset), RWF_NOWAIT));
    }

    SysResult start_writeback(int fd, Range range) override {
        return result_of(::sync_file_range(fd, file_offset(range.begin), file_offset(range.size()),
                                           SYNC_FILE_RANGE_WRITE));
    }

    SysResult wait_writeback(int fd, Range range) override {
        return result_of(::sync_file_range(
            fd, file_offset(range.begin), file_offset(range.size()),
            SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER));
    }

    SysResult drop_cached(int fd, Range range) override {
        return {.value = 0,
                .error = ::posix_fadvise(fd, file_offset(range.begin), file_offset(range.size()),
                                         POSIX_FADV_DONTNEED)};
    }

    SysResult truncate(int fd, std::uint64_t nbytes) override {
        return result_of(::ftruncate(fd, file_offset(nbytes)));
    }

    SysResult sync_data(int fd) override { return result_of(::fdatasync(fd)); }

    SysResult sync(int fd) override { return result_of(::fsync(fd)); }

    SysResult close(int fd) override {
        const int failed = ::close(fd);
        // Linux has closed the descriptor even then; a second call might close another thread's.
        if (failed != 0 && errno == EINTR) return {};
        return result_of(failed);
    }
};

}  // namespace

std::shared_ptr<FileOps> posix_file_ops() {
    return std::make_shared<PosixFileOps>();
}

}  // namespace datastates
