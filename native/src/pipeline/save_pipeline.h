// The threads that save: copy threads read sources into segments, flush threads write them out.
//
//     sources ─► copy threads ─► queue ─► flush threads (checksum, write, fdatasync) ─► done
//     on devices ─► copy threads enqueue ─► lane ─┘
//
// What devices have is copied by them: a copy thread only tells them to, and the device's lane sees
// when it is done.
//
// The queue is bounded by the cache, as every entry that waits in it for long holds a segment. Copy
// threads wait for jobs with an open window, and for segments; flush threads wait for entries, and
// never for segments: so what is read is always written, whatever else waits.
//
// A job may be streamed: flush threads sum what is read, and the caller takes it, piece by piece
// (save_stream.cpp). It holds segments until the caller has sent them, which no thread of the
// pipeline waits for. The oldest job goes on nevertheless:
//   - A streamed job is read only when no unit of an older job is left to take: what waits
//     for its caller never keeps segments from an older job.
//   - Units get their segments in the order of the files and of their bytes. So a unit that has one
//     lacks none that comes before it in its file, or in an older file: all of those have, or had,
//     theirs, and need no more to be read, summed and offered, in whatever order that happens. A
//     caller that takes the files in their order, one after another or some at a time, always finds
//     the next piece at last, even if what is behind it fills the cache.
//   - Callers send a piece, and let go of it, without waiting for more than the next of its file,
//     or for anything of a newer save. So two segments are enough, which slabs and restores always
//     leave: only one file at a time lacks segments, as those before it have all of theirs.
// Newer jobs may have to wait for segments until the caller has sent them, or the job has failed;
// then a piece that the caller still holds keeps its segment, but is not waited for.

#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/node_queue.h"
#include "base/pace.h"
#include "base/threads.h"
#include "device/devices.h"
#include "memory/host_cache.h"
#include "pipeline/crew.h"
#include "pipeline/jobs_in_flight.h"
#include "pipeline/save_job.h"
#include "pipeline/window.h"

namespace datastates {

/// Threads keep it alive: `join` ends them.
class SavePipeline : public WindowListener, public std::enable_shared_from_this<SavePipeline> {
  public:
    SavePipeline(std::shared_ptr<HostCache> cache, std::shared_ptr<Devices> devices,
                 std::size_t copy_threads, std::size_t flush_threads, std::uint64_t write_rate,
                 IoPriority io_priority);

    /// Starts the threads with the first job. False after `shutdown`.
    bool submit(const std::shared_ptr<SaveJob>& job);

    /// Fails `job` and drops what is queued of it. Returns immediately.
    void fail(const std::shared_ptr<SaveJob>& job, Fault fault) noexcept;

    /// Fails all jobs with a shutdown fault, and takes no more.
    void stop();
    /// Then, when devices are done with what they were given: joins the threads. Returns the names
    /// of the jobs that storage holds up, if threads have not ended by `deadline`. Once.
    std::vector<std::string> join(Clock::time_point deadline);

    void window_opened() override { wake_copy_threads(); }

  private:
    /// What a flush thread does next: open a file, write a unit, let go of the job, or (neither)
    /// sync the directories of a job that has no files, or let a failed job end.
    struct Task {
        SaveJob::Pin job;
        std::optional<std::size_t> open;
        std::optional<ReadUnit> write;
        bool let_go = false;
    };

    struct Reading {
        SaveJob::Pin job;
        SaveJob::Taken taken;
    };

    void start_threads();
    void queue_opening(const std::shared_ptr<SaveJob>& job);
    void wake_copy_threads();

    void copy_loop();
    [[nodiscard]] bool may_read(const std::shared_ptr<SaveJob>& job) const;
    std::shared_ptr<SaveJob> wait_for_open_job();
    Lease acquire_segment(const std::shared_ptr<SaveJob>& job, std::uint64_t epoch);
    std::optional<Reading> take_unit();
    void proceed(const SaveJob::Pin& job, SaveJob::Gathered gathered);
    void write_later(const SaveJob::Pin& job, std::optional<ReadUnit> read);
    void read_on_devices(const SaveJob::Pin& job, DeviceRead read);
    void push_ahead(NodeQueue<Task>::Node task);

    void flush_loop();
    std::optional<Task> next_task();
    void enqueue(Task task);
    void run(Task& task);
    void write(const SaveJob::Pin& job, ReadUnit read);
    void finish_job(const SaveJob::Pin& job);

    const std::shared_ptr<HostCache> cache_;
    const std::shared_ptr<Devices> devices_;
    const std::size_t copy_threads_;
    const std::size_t flush_threads_;
    Pace pace_;  // of writes
    const IoPriority io_priority_;

    JobsInFlight<SaveJob> jobs_;

    std::mutex mutex_;                       // guards what follows; taken before a job's
    std::condition_variable jobs_changed_;   // copy threads: unread_jobs_, windows, stopping_
    std::condition_variable tasks_changed_;  // flush threads: tasks_, all_failed_
    std::vector<std::shared_ptr<SaveJob>> unread_jobs_;  // units left to take; by order, arrival
    NodeQueue<Task> tasks_;
    bool stopping_ = false;    // copy threads end
    bool all_failed_ = false;  // flush threads end when no tasks are left
    bool ended_ = false;       // no thread takes tasks any more
    Crew threads_;             // joined by `shutdown`; has its own lock, taken after mutex_
};

}  // namespace datastates
