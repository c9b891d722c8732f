#include "files/output_file.h"

#include <fcntl.h>

#include <algorithm>

namespace datastates {
namespace {

/// Buffered writes that may be dirty at a time, per file: enough to keep the device busy.
constexpr std::size_t kMaxBehind = 4;

Fault io_fault(const std::string& path, const char* operation, int error, std::uint64_t offset) {
    return {.kind = FaultKind::kIo,
            .error = error,
            .path = path,
            .offset = offset,
            .operation = operation,
            .detail = {}};
}

}  // namespace

OutputFile::OutputFile(std::shared_ptr<FileOps> ops, std::string path, std::uint64_t nbytes)
    : ops_(std::move(ops)), path_(std::move(path)), nbytes_(nbytes) {}

Fault OutputFile::failed(const char* operation, int error, std::uint64_t offset) const {
    return io_fault(path_, operation, error, offset);
}

Status OutputFile::ensure_open() {
    std::unique_lock lock(mutex_);
    if (opening_ == Opening::kNotYet) {
        opening_ = Opening::kUnderWay;
        // Without the lock: the call may never return, and others must not wait for it then.
        lock.unlock();
        auto created = create();
        lock.lock();
        opened_ = std::move(created);
        opening_ = Opening::kTried;
        opening_changed_.notify_all();
    }
    opening_changed_.wait(lock, [&] { return opening_ == Opening::kTried || cancelled_; });
    return opening_ == Opening::kTried ? opened_ : cancelled();
}

void OutputFile::cancel() {
    const std::scoped_lock lock(mutex_);
    cancelled_ = true;
    opening_changed_.notify_all();
}

Status OutputFile::create() {
    constexpr mode_t kMode = 0644;  // less the umask
    const auto opened = uninterrupted(
        [&] { return ops_->open(path_, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, kMode); });
    if (!opened.ok()) return failed("open", opened.error, 0);
    const int fd = static_cast<int>(opened.value);
    fd_ = fd;
    // Set after opening, not with it: open(O_CREAT | O_DIRECT) may fail and yet leave the file.
    const auto direct = ops_->set_direct(fd, true);
    if (!direct.ok()) {
        if (!is_unsupported(direct.error)) return failed("open", direct.error, 0);
        direct_ = false;
    }
    // Finds a full disk before anything is read. And the writes that follow do not extend the file,
    // so the filesystem lets them go in parallel: on ext4 (Linux 6.18, four threads) 2 GiB were
    // durable about a tenth sooner.
    const auto allocated =
        uninterrupted([&] { return ops_->allocate(fd, round_up(nbytes_, kDirectAlignment)); });
    // EPERM: a container's seccomp profile that does not know the call. What may not be written
    // says so below, too.
    if (!allocated.ok() && !is_unsupported(allocated.error) && allocated.error != EPERM) {
        return failed("fallocate", allocated.error, 0);
    }
    return {};
}

Status OutputFile::fall_back() {
    // On the same descriptor, so writes under way in other threads are not disturbed.
    const auto result = ops_->set_direct(fd_, false);
    if (!result.ok()) return failed("open", result.error, 0);
    direct_ = false;
    return {};
}

Status OutputFile::write(std::span<const std::byte> data, std::uint64_t offset) {
    const Range range{.begin = offset, .end = std::min(offset + data.size(), nbytes_)};
    std::uint64_t done = 0;
    while (done < range.size()) {
        const bool direct = direct_;
        const auto left = direct ? data.subspan(done) : data.first(range.size()).subspan(done);
        const auto result = uninterrupted([&] { return ops_->write(fd_, left, offset + done); });
        if (direct && is_unsupported(result.error)) {
            if (auto status = fall_back(); !status.ok()) return status;
            continue;
        }
        if (!result.ok()) return failed("write", result.error, offset + done);
        const auto written = static_cast<std::uint64_t>(result.value);
        if (written == 0) return failed("write", EIO, offset + done);
        if (written >= left.size()) break;
        // A short direct write goes on from the last aligned place; one shorter than that,
        // buffered.
        const std::uint64_t aligned = written / kDirectAlignment * kDirectAlignment;
        if (direct && aligned == 0) {
            if (auto status = fall_back(); !status.ok()) return status;
        }
        done += direct ? aligned : written;
    }
    return direct_ ? Status() : limit_dirty(range);
}

Status OutputFile::limit_dirty(Range written) {
    // An error of write-back must be reported from here: having been told to this descriptor once,
    // it is not told to fdatasync again.
    const auto started = uninterrupted([&] { return ops_->start_writeback(fd_, written); });
    if (!started.ok() && !is_unsupported(started.error)) {
        return failed("write", started.error, written.begin);
    }
    Range oldest;
    {
        const std::scoped_lock lock(mutex_);
        behind_.push_back(written);
        if (behind_.size() <= kMaxBehind) return {};
        oldest = behind_.front();
        behind_.pop_front();
    }
    const auto waited = uninterrupted([&] { return ops_->wait_writeback(fd_, oldest); });
    if (!waited.ok() && !is_unsupported(waited.error)) {
        return failed("write", waited.error, oldest.begin);
    }
    ops_->drop_cached(fd_, oldest);  // advice
    return {};
}

Status OutputFile::finish() {
    const int fd = fd_;
    const auto cut = uninterrupted([&] { return ops_->truncate(fd, nbytes_); });
    if (!cut.ok()) return failed("ftruncate", cut.error, nbytes_);
    // Once failed, the lost pages are clean and a second fdatasync would succeed: never retried.
    const auto synced = uninterrupted([&] { return ops_->sync_data(fd); });
    if (!synced.ok()) return failed("fdatasync", synced.error, 0);
    if (!direct_) ops_->drop_cached(fd, {.begin = 0, .end = nbytes_});
    fd_ = -1;
    const auto closed = ops_->close(fd);
    if (!closed.ok()) return failed("close", closed.error, 0);
    return {};
}

void OutputFile::abandon() {
    const int fd = fd_.exchange(-1);
    if (fd >= 0) ops_->close(fd);  // its errors matter no more
}

Status sync_directory(FileOps& ops, const std::string& path) {
    const auto opened =
        uninterrupted([&] { return ops.open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0); });
    if (!opened.ok()) return io_fault(path, "open", opened.error, 0);
    const int fd = static_cast<int>(opened.value);
    const auto synced = uninterrupted([&] { return ops.sync(fd); });
    const auto closed = ops.close(fd);
    // SMB clients have no fsync of directories: their server keeps the entries itself.
    if (!synced.ok() && !is_unsupported(synced.error)) {
        return io_fault(path, "fsync", synced.error, 0);
    }
    if (!closed.ok()) return io_fault(path, "close", closed.error, 0);
    return {};
}

}  // namespace datastates
