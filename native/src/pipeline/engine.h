// The engine: a host cache, and the threads that save and restore through it.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/fault.h"
#include "base/immovable.h"
#include "device/devices.h"
#include "files/file_ops.h"
#include "memory/host_cache.h"
#include "pipeline/restore_job.h"
#include "pipeline/restore_pipeline.h"
#include "pipeline/save_job.h"
#include "pipeline/save_pipeline.h"
#include "pipeline/window.h"

namespace datastates {

/// A save in flight, for its caller. Dropped before all is read, or if it is streamed, it cancels
/// the save and waits for copies under way; else, the save goes on by itself.
class SaveHandle : public Immovable {
  public:
    SaveHandle(std::shared_ptr<SavePipeline> pipeline, std::shared_ptr<SaveJob> job);
    ~SaveHandle();

    void cancel() { fail(cancelled()); }
    /// Returns immediately. Nothing if the save is done or has failed.
    void fail(Fault fault);
    SaveJob* operator->() const { return job_.get(); }
    /// For a thread that takes pieces, and may outlive the handle.
    [[nodiscard]] const std::shared_ptr<SaveJob>& job() const { return job_; }

  private:
    std::shared_ptr<SavePipeline> pipeline_;
    std::shared_ptr<SaveJob> job_;
};

/// A restore in flight, for its caller. Dropped early, it cancels the restore and waits until no
/// thread writes to its memory.
class RestoreHandle : public Immovable {
  public:
    RestoreHandle(std::shared_ptr<RestorePipeline> pipeline, std::shared_ptr<RestoreJob> job);
    ~RestoreHandle();

    void cancel() { fail(cancelled()); }
    /// Returns immediately. Nothing if the restore is done or has failed.
    void fail(Fault fault);
    RestoreJob* operator->() const { return job_.get(); }

    /// Of a streamed restore; may outlive the handle.
    using Requests = std::function<std::optional<std::shared_ptr<ReadRequest>>(Clock::time_point)>;
    [[nodiscard]] Requests requests() const;

  private:
    std::shared_ptr<RestorePipeline> pipeline_;
    std::shared_ptr<RestoreJob> job_;
};

struct ThreadCounts {
    std::size_t copy = 2;
    std::size_t flush = 4;
    std::size_t restore = 4;  ///< that read; half as many more use what they have read
};

/// What saves leave to others. Rates are in bytes per second; 0: no limit.
struct Limits {
    std::uint64_t copy_rate = 0;   ///< from each device; not what is copied at the call
    std::uint64_t write_rate = 0;  ///< to storage, of all saves together
    IoPriority io_priority = IoPriority::kNormal;
};

class Engine : public Immovable {
  public:
    /// Throws std::invalid_argument, or std::bad_alloc. Threads start when they are first needed.
    /// Devices are CUDA's where no other `api` is given. A shutdown waits `patience` for devices
    /// that hang, and abandons the memory that they may still use.
    explicit Engine(std::uint64_t host_cache_bytes, ThreadCounts threads = {},
                    std::shared_ptr<FileOps> ops = posix_file_ops(),
                    std::shared_ptr<DeviceApi> api = nullptr,
                    Clock::duration patience = Patience::kDefault, Limits limits = {});
    ~Engine() { shutdown(); }

    [[nodiscard]] HostCache& cache() const { return *cache_; }
    [[nodiscard]] const std::shared_ptr<HostCache>& shared_cache() const { return cache_; }

    [[nodiscard]] Devices& devices() const { return *devices_; }

    /// Adds segments until the cache has `nbytes`. Throws std::bad_alloc, and is then unchanged.
    void grow(std::uint64_t nbytes);

    /// Throws std::invalid_argument for a path named twice or a device that is not open,
    /// std::runtime_error after `shutdown`. Fails with kTorn if what is read is not as `expected`.
    std::shared_ptr<SaveHandle> save(const std::vector<SaveFile>& files,
                                     std::vector<std::string> sync_directories, std::uint64_t order,
                                     const std::shared_ptr<Window>& window, Fences fences = {},
                                     std::shared_ptr<ExpectedBytes> expected = nullptr);

    /// The same, but the caller takes the files' bytes (SaveJob::take) and sends them, and says
    /// when they are stored. Their paths are only names.
    std::shared_ptr<SaveHandle> save_streamed(const std::vector<SaveFile>& files,
                                              std::uint64_t order,
                                              const std::shared_ptr<Window>& window,
                                              Fences fences = {},
                                              std::shared_ptr<ExpectedBytes> expected = nullptr);

    /// Throws std::invalid_argument for a device that is not open, std::runtime_error after
    /// `shutdown`.
    std::shared_ptr<RestoreHandle> restore(const std::vector<RestoreFile>& files,
                                           Fences fences = {});

    /// The same, but the caller fetches what is read (RestorePipeline::take), and has checked that
    /// the files have their sizes. Their paths are only names.
    std::shared_ptr<RestoreHandle> restore_streamed(const std::vector<RestoreFile>& files,
                                                    Fences fences = {});

    /// Enqueues the copies of `content`, all on `device`, into memory at `out` (where byte 0 of the
    /// stream goes) on `stream`. Throws std::invalid_argument if the content is elsewhere or the
    /// device is not open.
    Enqueued copy_to_host(const StreamContent& content, std::byte* out, int device,
                          StreamHandle stream);

    /// Fails what is in flight and joins all threads. If file operations do not return within
    /// `patience`, their threads are left in them, with all that they use, and the names of their
    /// jobs are returned: once. Idempotent, any thread.
    std::vector<std::string> shutdown(Clock::duration patience = Patience::kDefault);

    [[nodiscard]] bool alive() const { return alive_; }

  private:
    void require_open(const StreamContent& content) const;
    void check_files(const std::vector<SaveFile>& files) const;
    std::shared_ptr<SaveHandle> submit(const std::shared_ptr<SaveJob>& job);
    std::shared_ptr<RestoreHandle> submit(const std::shared_ptr<RestoreJob>& job);

    const std::shared_ptr<FileOps> ops_;
    const std::shared_ptr<HostCache> cache_;
    const std::shared_ptr<Devices> devices_;
    const std::shared_ptr<SavePipeline> saves_;
    const std::shared_ptr<RestorePipeline> restores_;
    std::atomic<bool> alive_ = true;
    std::mutex shutdown_mutex_;  // held during `shutdown`: a second caller returns after the first
};

}  // namespace datastates
