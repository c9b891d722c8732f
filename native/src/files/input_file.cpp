#include "files/input_file.h"

#include <fcntl.h>

#include <algorithm>
#include <utility>

#include "base/sizes.h"

namespace datastates {
InputFile::InputFile(std::shared_ptr<FileOps> ops, std::string path)
    : ops_(std::move(ops)), path_(std::move(path)) {}

InputFile::~InputFile() {
    if (fd_ >= 0) ops_->close(fd_);  // nothing was written: nothing to lose
}

Status InputFile::open(std::uint64_t nbytes) {
    Fault fault{.kind = FaultKind::kIo, .path = path_, .operation = "open", .detail = {}};
    // O_NONBLOCK: a pipe in the file's place must not block; its size is not the file's.
    constexpr int kFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
    const auto opened = uninterrupted([&] { return ops_->open(path_, kFlags, 0); });
    if (!opened.ok()) {
        fault.error = opened.error;
        return fault;
    }
    fd_ = static_cast<int>(opened.value);
    const auto size = ops_->size(fd_);
    if (!size.ok()) {
        fault.error = size.error;
        fault.operation = "fstat";
        return fault;
    }
    const auto found = static_cast<std::uint64_t>(size.value);
    if (found != nbytes) {
        fault.kind = FaultKind::kCorrupt;
        fault.operation = "fstat";
        fault.offset = std::min(found, nbytes);
        fault.detail = (found < nbytes ? "short file: it has " : "wrong size: it has ") +
                       std::to_string(found) + " bytes instead of " + std::to_string(nbytes);
        return fault;
    }
    return {};
}

void InputFile::leave_cache() {
    const std::scoped_lock lock(switching_);
    if (way_ == Way::kCached)
        way_ = ops_->set_direct(fd_, true).ok() ? Way::kDirect : Way::kBuffered;
}

Status InputFile::leave_direct() {
    const auto result = ops_->set_direct(fd_, false);
    if (!result.ok()) {
        return Fault{.kind = FaultKind::kIo,
                     .error = result.error,
                     .path = path_,
                     .operation = "open",
                     .detail = {}};
    }
    way_ = Way::kBuffered;
    return {};
}

Status InputFile::read(std::span<std::byte> buffer, std::uint64_t offset, std::uint64_t nbytes) {
    std::uint64_t done = 0;
    while (done < nbytes) {
        const Way way = way_;
        const bool direct = way == Way::kDirect;
        if (direct) done = done / kDirectAlignment * kDirectAlignment;
        const auto place = buffer.subspan(
            done, direct ? round_up(nbytes, kDirectAlignment) - done : nbytes - done);
        if (way == Way::kCached) {
            const auto cached =
                uninterrupted([&] { return ops_->read_cached(fd_, place, offset + done); });
            if (cached.ok() && cached.value > 0) {
                done += static_cast<std::uint64_t>(cached.value);
            } else {
                leave_cache();
            }
            continue;
        }
        const auto result = uninterrupted([&] { return ops_->read(fd_, place, offset + done); });
        if (direct && is_unsupported(result.error)) {
            if (auto status = leave_direct(); !status.ok()) return status;
            continue;
        }
        const auto got = static_cast<std::uint64_t>(std::max<std::int64_t>(0, result.value));
        if (!result.ok() || got == 0) {
            return Fault{.kind = FaultKind::kIo,
                         .error = result.error,
                         .path = path_,
                         .offset = offset + done,
                         .operation = "read",
                         .detail = result.ok() ? "the file ends too early" : ""};
        }
        if (!direct || done + got >= nbytes) {
            done += got;
            continue;
        }
        // A short direct read goes on from the last aligned place; one shorter than that, buffered.
        done += got / kDirectAlignment * kDirectAlignment;
        if (got < kDirectAlignment) {
            if (auto status = leave_direct(); !status.ok()) return status;
        }
    }
    return {};
}

}  // namespace datastates
