#include "memory/guarded_copy.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>

#include "base/immovable.h"

namespace datastates {
namespace {

/// What the kernel takes in one call (UIO_MAXIOV).
constexpr std::size_t kMaxPieces = 1024;

/// True if all was copied. False says nothing: the kernel may refuse the call, or the kind of
/// memory.
bool copy_at_once(std::span<const DeviceCopy> copies) {
    std::array<iovec, kMaxPieces> to{};
    std::array<iovec, kMaxPieces> from{};
    std::uint64_t expected = 0;
    for (std::size_t i = 0; i < copies.size(); ++i) {
        to.at(i) = {.iov_base = copies[i].to, .iov_len = copies[i].nbytes};
        from.at(i) = {.iov_base = const_cast<std::byte*>(copies[i].from),  // NOLINT(*-const-cast)
                      .iov_len = copies[i].nbytes};
        expected += copies[i].nbytes;
    }
    const ssize_t copied =
        process_vm_readv(getpid(), to.data(), copies.size(), from.data(), copies.size(), 0);
    return copied >= 0 && static_cast<std::uint64_t>(copied) == expected;
}

/// write(2) takes any memory that the program itself can read, and reports what it cannot.
class Pipe : public Immovable {
  public:
    Pipe() {
        if (pipe2(ends_.data(), O_CLOEXEC) != 0) {
            error_ = errno;
            return;
        }
        capacity_ = fcntl(ends_[1], F_GETPIPE_SZ);
        if (capacity_ <= 0) error_ = errno;
    }
    ~Pipe() {
        for (const int end : ends_) {
            if (end >= 0) close(end);
        }
    }

    /// 0, or an errno.
    int copy(const DeviceCopy& piece) {
        if (error_ != 0) return error_;
        for (std::uint64_t done = 0; done < piece.nbytes;) {
            const auto part =
                std::min<std::uint64_t>(piece.nbytes - done, static_cast<std::uint64_t>(capacity_));
            const ssize_t written = write(ends_[1], piece.from + done, part);
            if (written < 0 && errno == EINTR) continue;
            if (written < 0) return errno;
            for (ssize_t fetched = 0; fetched < written;) {
                const ssize_t now = read(ends_[0], piece.to + done + fetched,
                                         static_cast<std::size_t>(written - fetched));
                if (now < 0 && errno == EINTR) continue;
                if (now <= 0) return now < 0 ? errno : EIO;
                fetched += now;
            }
            done += static_cast<std::uint64_t>(written);
        }
        return 0;
    }

  private:
    std::array<int, 2> ends_{-1, -1};
    int capacity_ = 0;
    int error_ = 0;
};

}  // namespace

int copy_guarded(std::span<const DeviceCopy> copies) {
    while (!copies.empty()) {
        const auto batch = copies.first(std::min(copies.size(), kMaxPieces));
        if (!copy_at_once(batch)) {
            Pipe pipe;
            for (const DeviceCopy& piece : batch) {
                if (const int error = pipe.copy(piece)) return error;
            }
        }
        copies = copies.subspan(batch.size());
    }
    return 0;
}

}  // namespace datastates
