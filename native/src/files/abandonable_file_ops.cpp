#include "files/abandonable_file_ops.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <utility>

#include "base/immovable.h"

namespace datastates {
namespace {

Fault stuck(const char* operation, const std::string& path, Clock::duration lasted) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(lasted).count();
    return {.kind = FaultKind::kStuck,
            .error = ETIMEDOUT,
            .path = path,
            .operation = operation,
            .detail = "has not returned for " + std::to_string(seconds) +
                      " s; given up as the process ends"};
}

}  // namespace

/// An operation under way, on the stack of its thread.
class AbandonableFileOps::Call : public Immovable {
  public:
    Call(AbandonableFileOps& ops, const char* operation, const std::string& path)
        : ops_(ops), operation_(operation), path_(&path) {
        const std::scoped_lock lock(ops_.mutex_);
        next_ = std::exchange(ops_.calls_, this);
    }
    ~Call() {
        {
            const std::scoped_lock lock(ops_.mutex_);
            if (unlink()) return;
        }
        while (true) ::pause();  // given up
    }

    [[nodiscard]] bool is_by(std::thread::id thread) const { return thread_ == thread; }
    [[nodiscard]] Call* next() const { return next_; }
    [[nodiscard]] Clock::time_point since() const { return since_; }
    [[nodiscard]] Fault fault() const { return stuck(operation_, *path_, Clock::now() - since_); }

    /// Takes it off the list; false if it was given up. ops_.mutex_ is held.
    bool unlink() {
        for (Call** link = &ops_.calls_; *link != nullptr; link = &(*link)->next_) {
            if (*link != this) continue;
            *link = next_;
            return true;
        }
        return false;
    }

  private:
    AbandonableFileOps& ops_;
    const char* const operation_;
    const std::string* const path_;
    const std::thread::id thread_ = std::this_thread::get_id();
    const Clock::time_point since_ = Clock::now();
    Call* next_ = nullptr;
};

std::optional<Fault> AbandonableFileOps::abandon(std::thread::id thread) {
    const std::scoped_lock lock(mutex_);
    for (Call* call = calls_; call != nullptr; call = call->next()) {
        if (!call->is_by(thread)) continue;
        if (!patience_.is_over(call->since())) return std::nullopt;
        Fault fault = call->fault();
        abandoned_.push_back(fault);
        call->unlink();
        return fault;
    }
    return std::nullopt;
}

std::vector<Fault> AbandonableFileOps::abandoned() const {
    const std::scoped_lock lock(mutex_);
    return abandoned_;
}

/// Stays where it is until the file is closed.
const std::string& AbandonableFileOps::path_of(int fd) const {
    const std::scoped_lock lock(mutex_);
    const auto found = paths_.find(fd);
    return found == paths_.end() ? no_path_ : found->second;
}

template <typename Operation>
SysResult AbandonableFileOps::during(const char* name, int fd, const Operation& operation) {
    const Call call(*this, name, path_of(fd));
    return operation();
}

SysResult AbandonableFileOps::open(const std::string& path, int flags, mode_t mode) {
    std::map<int, std::string> named{{-1, path}};  // now: once it is open, nothing may fail
    SysResult opened;
    {
        const Call call(*this, "open", path);
        opened = inner_->open(path, flags, mode);
    }
    if (!opened.ok()) return opened;
    auto file = named.extract(-1);
    file.key() = static_cast<int>(opened.value);
    const std::scoped_lock lock(mutex_);
    paths_.insert(std::move(file));
    return opened;
}

SysResult AbandonableFileOps::close(int fd) {
    std::map<int, std::string>::node_type file;
    {
        // Forgotten before it is closed: then another thread may be given the same number.
        const std::scoped_lock lock(mutex_);
        file = paths_.extract(fd);
    }
    if (file.empty()) return inner_->close(fd);
    const Call call(*this, "close", file.mapped());
    return inner_->close(fd);
}

SysResult AbandonableFileOps::set_direct(int fd, bool direct) {
    return during("fcntl", fd, [&] { return inner_->set_direct(fd, direct); });
}

SysResult AbandonableFileOps::size(int fd) {
    return during("fstat", fd, [&] { return inner_->size(fd); });
}

SysResult AbandonableFileOps::allocate(int fd, std::uint64_t nbytes) {
    return during("fallocate", fd, [&] { return inner_->allocate(fd, nbytes); });
}

SysResult AbandonableFileOps::write(int fd, std::span<const std::byte> data, std::uint64_t offset) {
    return during("pwrite", fd, [&] { return inner_->write(fd, data, offset); });
}

SysResult AbandonableFileOps::read(int fd, std::span<std::byte> data, std::uint64_t offset) {
    return during("pread", fd, [&] { return inner_->read(fd, data, offset); });
}

SysResult AbandonableFileOps::read_cached(int fd, std::span<std::byte> data, std::uint64_t offset) {
    return during("preadv2", fd, [&] { return inner_->read_cached(fd, data, offset); });
}

SysResult AbandonableFileOps::start_writeback(int fd, Range range) {
    return during("sync_file_range", fd, [&] { return inner_->start_writeback(fd, range); });
}

SysResult AbandonableFileOps::wait_writeback(int fd, Range range) {
    return during("sync_file_range", fd, [&] { return inner_->wait_writeback(fd, range); });
}

SysResult AbandonableFileOps::drop_cached(int fd, Range range) {
    return during("posix_fadvise", fd, [&] { return inner_->drop_cached(fd, range); });
}

SysResult AbandonableFileOps::truncate(int fd, std::uint64_t nbytes) {
    return during("ftruncate", fd, [&] { return inner_->truncate(fd, nbytes); });
}

SysResult AbandonableFileOps::sync_data(int fd) {
    return during("fdatasync", fd, [&] { return inner_->sync_data(fd); });
}

SysResult AbandonableFileOps::sync(int fd) {
    return during("fsync", fd, [&] { return inner_->sync(fd); });
}

}  // namespace datastates
