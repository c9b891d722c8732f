// Directories, random bytes, reference files, and file operations that fail on demand.

#pragma once

#include <sched.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/immovable.h"
#include "files/failpoints.h"
#include "files/file_ops.h"
#include "memory/host_cache.h"
#include "memory/transfer.h"
#include "pipeline/engine.h"
#include "pipeline/save_job.h"
#include "pipeline/window.h"

namespace datastates::testing {

/// Bytes that compare as memory does: std::equal looks at each std::byte by itself, and so does
/// ThreadSanitizer.
struct Bytes : std::vector<std::byte> {
    using std::vector<std::byte>::vector;
    friend bool operator==(const Bytes& a, const Bytes& b) {
        return a.size() == b.size() &&
               (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
    }
};
using Random = std::mt19937_64;

inline constexpr std::uint64_t kMiB = std::uint64_t{1} << 20U;
/// The smallest that an engine may have.
inline constexpr std::uint64_t kSmallCache = kMinSegments * kSegmentBytes;

/// An empty directory, removed with all it holds.
class TemporaryDirectory : public Immovable {
  public:
    TemporaryDirectory();
    ~TemporaryDirectory();

    [[nodiscard]] std::string path() const { return path_.string(); }
    [[nodiscard]] std::string file(const std::string& name) const {
        return (path_ / name).string();
    }

  private:
    std::filesystem::path path_;
};

Bytes random_bytes(std::uint64_t size, std::uint64_t seed);
std::uint64_t random_below(Random& random, std::uint64_t bound);
Bytes read_file(const std::string& path);
std::string text_of(const std::string& path);
void write_file(const std::string& path, std::span<const std::byte> bytes);

Clock::time_point in(double seconds);

/// Waits until `holds`; fails the case with `what` if that takes longer than `seconds`.
void wait_until(std::string_view what, const std::function<bool()>& holds, double seconds = 60,
                std::source_location where = std::source_location::current());

/// At each hit; or at the `nth` alone.
Failpoint error_at(std::string name, int error, std::optional<std::uint64_t> nth = {});
Failpoint sleep_at(std::string name, double seconds, std::optional<std::uint64_t> nth = {});

/// All threads that are started from now on share one core, as long as this lives; of this thread.
class OneCore : public Immovable {
  public:
    OneCore();
    ~OneCore();

  private:
    cpu_set_t before_;
};

/// A thread runs only while none else on its core wants to: a thread that it wakes goes on at once,
/// and it does not. (Where the system refuses, what is tested so becomes a matter of chance.)
void starve(pid_t thread);

/// Waits until no segment is in use. (Soon after the last job: a copy thread may just have taken
/// one for a unit that another thread got.) Fails the case if that does not happen.
void check_all_free(const HostCache& cache);

std::shared_ptr<Window> open_window();

/// The job ends, and has no fault.
void check_durable(const SaveHandle& save,
                   std::source_location where = std::source_location::current());
void check_restored(const RestoreHandle& restore,
                    std::source_location where = std::source_location::current());

/// All of the stream of a file, which goes to `out`.
RestoreFile whole_file(const std::string& path, Bytes& out);

/// The file that a stream must become, made the obvious way.
Bytes reference_file(std::span<const std::byte> stream);

/// Memory that a file's regions lie in, and the stream that they make.
struct Source {
    /// A stream of `size` bytes, some of it gaps, cut into regions of up to `max_region` bytes that
    /// belong to groups 0 to 2.
    Source(std::uint64_t size, std::uint64_t max_region, std::uint64_t seed);

    Bytes memory;
    Bytes stream;
    Transfer transfer;
    std::vector<Range> regions;
};

/// The system's file operations, each of which a test may watch or replace.
class HookedFileOps final : public FileOps {
  public:
    enum class Call : std::uint8_t {
        kOpen,
        kSetDirect,
        kSize,
        kAllocate,
        kWrite,
        kRead,
        kReadCached,  ///< as if nothing were cached, unless the hook cuts it
        kStartWriteback,
        kWaitWriteback,
        kDropCached,
        kTruncate,
        kSyncData,
        kSync,
        kClose,
        kGather  ///< no path
    };
    struct Event {
        Call call;
        std::string path;
        std::uint64_t offset = 0;
        std::uint64_t size = 0;
    };
    /// What to return instead of making the call; or a size to cut a read or write to.
    struct Instead {
        std::optional<SysResult> result;
        std::optional<std::uint64_t> cut;
    };
    using Hook = std::function<Instead(const Event&)>;

    /// The call is not made, and fails.
    static Instead failing(int error) {
        return {.result = SysResult{.value = -1, .error = error}, .cut = {}};
    }

    explicit HookedFileOps(Hook hook = nullptr) : hook_(std::move(hook)) {}

    [[nodiscard]] std::vector<Event> trace() const;
    [[nodiscard]] std::size_t open_files() const;
    /// How many times the system's page cache did not have all that it was asked for.
    [[nodiscard]] int refusals() const { return refusals_; }

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
    SysResult gather_begins() override;

  private:
    Instead observe(Call call, int fd, std::uint64_t offset, std::uint64_t size);

    const std::shared_ptr<FileOps> system_ = posix_file_ops();
    const Hook hook_;  // called by any thread
    std::atomic<int> refusals_ = 0;
    mutable std::mutex mutex_;  // guards what follows
    std::map<int, std::string> paths_;
    std::vector<Event> trace_;
};

}  // namespace datastates::testing
