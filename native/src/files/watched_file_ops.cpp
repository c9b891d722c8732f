#include "files/watched_file_ops.h"

#include <fcntl.h>

#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include "files/trace.h"

namespace datastates {
namespace {

enum class Use : std::uint8_t { kSave, kRestore, kDirectory };

struct OpenFile {
    std::string path;
    Use use = Use::kRestore;
};

Use use_of(int flags) {
    if ((static_cast<unsigned>(flags) & static_cast<unsigned>(O_DIRECTORY)) != 0) {
        return Use::kDirectory;
    }
    return (flags & O_ACCMODE) == O_RDONLY ? Use::kRestore : Use::kSave;
}

/// The failpoints of an open or close; none where there is no such name.
std::string_view operation_of(Use use, std::string_view save, std::string_view restore) {
    switch (use) {
        case Use::kSave:
            return save;
        case Use::kRestore:
            return restore;
        case Use::kDirectory:
            return {};
    }
    return {};
}

SysResult failure(int error) {
    return {.value = -1, .error = error};
}

class WatchedFileOps final : public FileOps {
  public:
    WatchedFileOps(std::shared_ptr<FileOps> inner, std::shared_ptr<Failpoints> failpoints,
                   std::optional<Trace> trace)
        : inner_(std::move(inner)), failpoints_(std::move(failpoints)), trace_(std::move(trace)) {}

    SysResult open(const std::string& path, int flags, mode_t mode) override {
        const Use use = use_of(flags);
        const auto operation = operation_of(use, "flush.open", "restore.open");
        if (const int error = before(operation)) return failure(error);
        const SysResult opened = inner_->open(path, flags, mode);
        if (!opened.ok()) return opened;
        const int fd = static_cast<int>(opened.value);
        const bool creates = (static_cast<unsigned>(flags) & static_cast<unsigned>(O_CREAT)) != 0;
        int error = creates ? record([&](const Trace& trace) { return trace.created(path); }) : 0;
        if (error == 0) error = after(operation);
        if (error != 0) {
            inner_->close(fd);
            return failure(error);
        }
        const std::scoped_lock lock(mutex_);
        open_files_[fd] = {.path = path, .use = use};
        return opened;
    }

    SysResult allocate(int fd, std::uint64_t nbytes) override {
        return watched(
            "flush.allocate", [&] { return inner_->allocate(fd, nbytes); },
            [&](const Trace& trace, std::int64_t) { return trace.allocated(path_of(fd), nbytes); });
    }

    SysResult write(int fd, std::span<const std::byte> data, std::uint64_t offset) override {
        return watched(
            "flush.write", [&] { return inner_->write(fd, data, offset); },
            [&](const Trace& trace, std::int64_t written) {
                return trace.wrote(path_of(fd), offset,
                                   data.first(static_cast<std::size_t>(written)));
            });
    }

    SysResult truncate(int fd, std::uint64_t nbytes) override {
        return watched(
            "flush.truncate", [&] { return inner_->truncate(fd, nbytes); },
            [&](const Trace& trace, std::int64_t) { return trace.truncated(path_of(fd), nbytes); });
    }

    SysResult sync_data(int fd) override {
        return synced("sync.data", fd, [&] { return inner_->sync_data(fd); });
    }

    SysResult sync(int fd) override {
        return synced("sync.directory", fd, [&] { return inner_->sync(fd); });
    }

    SysResult read(int fd, std::span<std::byte> data, std::uint64_t offset) override {
        return watched(
            "restore.read", [&] { return inner_->read(fd, data, offset); },
            [](const Trace&, std::int64_t) { return 0; });
    }

    SysResult close(int fd) override {
        std::string_view operation;
        {
            // Forgotten before it is closed: then another thread may be given the same number.
            const std::scoped_lock lock(mutex_);
            const auto file = open_files_.extract(fd);
            if (!file.empty()) operation = operation_of(file.mapped().use, "flush.close", {});
        }
        const int error = before(operation);
        const SysResult closed = inner_->close(fd);
        if (error != 0) return failure(error);
        if (!closed.ok()) return closed;
        if (const int error_after = after(operation)) return failure(error_after);
        return closed;
    }

    SysResult gather_begins() override {
        if (const int error = before("read")) return failure(error);
        return inner_->gather_begins();
    }

    SysResult gather_ended() override {
        const SysResult ended = inner_->gather_ended();
        if (!ended.ok()) return ended;
        if (const int error = after("read")) return failure(error);
        return ended;
    }

    SysResult set_direct(int fd, bool direct) override { return inner_->set_direct(fd, direct); }
    SysResult size(int fd) override { return inner_->size(fd); }
    SysResult start_writeback(int fd, Range range) override {
        return inner_->start_writeback(fd, range);
    }
    SysResult wait_writeback(int fd, Range range) override {
        return inner_->wait_writeback(fd, range);
    }
    SysResult drop_cached(int fd, Range range) override { return inner_->drop_cached(fd, range); }

  private:
    int before(std::string_view operation) { return hit(operation, ".before"); }
    int after(std::string_view operation) { return hit(operation, ".after"); }

    int hit(std::string_view operation, std::string_view when) {
        if (operation.empty() || !failpoints_) return 0;
        return failpoints_->hit(std::string(operation).append(when));
    }

    /// Makes `line` in the trace, if there is one.
    template <typename Line>
    int record(const Line& line) const {
        return trace_ ? line(*trace_) : 0;
    }

    /// `call` between its failpoints; `line` puts what it did, and its result, into the trace.
    template <typename Call, typename Line>
    SysResult watched(std::string_view operation, const Call& call, const Line& line) {
        if (const int error = before(operation)) return failure(error);
        const SysResult result = call();
        if (!result.ok()) return result;
        int error = record([&](const Trace& trace) { return line(trace, result.value); });
        if (error == 0) error = after(operation);
        return error != 0 ? failure(error) : result;
    }

    template <typename Call>
    SysResult synced(std::string_view operation, int fd, const Call& call) {
        const std::string id = trace_ ? Trace::new_sync_id() : "";
        return watched(
            operation,
            [&]() -> SysResult {
                const int error =
                    record([&](const Trace& trace) { return trace.sync_begins(path_of(fd), id); });
                return error != 0 ? failure(error) : call();
            },
            [&](const Trace& trace, std::int64_t) { return trace.synced(path_of(fd), id); });
    }

    std::string path_of(int fd) const {
        const std::scoped_lock lock(mutex_);
        const auto file = open_files_.find(fd);
        return file != open_files_.end() ? file->second.path : "";
    }

    const std::shared_ptr<FileOps> inner_;
    const std::shared_ptr<Failpoints> failpoints_;  // or none
    const std::optional<Trace> trace_;
    mutable std::mutex mutex_;  // guards open_files_
    std::map<int, OpenFile> open_files_;
};

}  // namespace

std::shared_ptr<FileOps> watched_file_ops(std::shared_ptr<FileOps> inner, const Watch& watch) {
    const bool fails = watch.failpoints && !watch.failpoints->empty();
    if (!fails && watch.trace_path.empty()) return inner;
    std::optional<Trace> trace;
    if (!watch.trace_path.empty()) trace.emplace(watch.trace_path);
    return std::make_shared<WatchedFileOps>(std::move(inner), watch.failpoints, std::move(trace));
}

}  // namespace datastates
