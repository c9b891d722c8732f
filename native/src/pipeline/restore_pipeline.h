// The threads that restore. Some take a step, get a segment, and read; others verify and scatter
// what came from the disk, so that the disk always has reads to do. What came from the page cache,
// and the checksum table, is used by the thread that has read it.
//
// Devices copy their part from the segment while the threads go on with others.
//
// The steps of a streamed job are not for these threads. The caller's threads take them, each with
// a segment to fill, fetch their bytes, and then verify and scatter them as these do. So nothing
// here waits for a network: a step that is being fetched holds its segment, and it alone.
//
// A step that was read holds its segment too, and needs no other one: the threads that use it only
// wait for such steps. So those that read get their segments.

#pragma once

#include <condition_variable>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/immovable.h"
#include "base/node_queue.h"
#include "device/devices.h"
#include "memory/host_cache.h"
#include "pipeline/crew.h"
#include "pipeline/jobs_in_flight.h"
#include "pipeline/restore_job.h"

namespace datastates {

class RestorePipeline;

/// A range of a file that the caller fetches. Dropped before `fill`, it cancels the restore. When
/// the restore has failed, it is not waited for, but keeps its segment.
class ReadRequest : public Immovable {
  public:
    ReadRequest(std::shared_ptr<RestorePipeline> pipeline, std::shared_ptr<RestoreJob> job,
                Fetch fetch, Lease memory);
    ~ReadRequest();

    [[nodiscard]] const Fetch& fetch() const { return fetch_; }

    /// Copies what was fetched, as many bytes as the range has, into the segment, verifies and
    /// scatters it; what is wrong with it fails the restore. Once.
    void fill(std::span<const std::byte> bytes);

  private:
    std::shared_ptr<RestorePipeline> pipeline_;
    std::shared_ptr<RestoreJob> job_;
    Fetch fetch_;
    Lease memory_;  // until filled
};

/// Threads keep it alive: `join` ends them.
class RestorePipeline : public std::enable_shared_from_this<RestorePipeline>, public Immovable {
  public:
    RestorePipeline(std::shared_ptr<HostCache> cache, std::shared_ptr<Devices> devices,
                    std::size_t threads);

    /// Starts the threads with the first job. False after `shutdown`.
    bool submit(const std::shared_ptr<RestoreJob>& job);

    /// Fails `job` and drops what is queued of it. Returns immediately.
    void fail(const std::shared_ptr<RestoreJob>& job, Fault fault) noexcept;

    /// What the caller is to fetch next for a streamed job; null when there will be no more. None
    /// if `deadline` passes first.
    std::optional<std::shared_ptr<ReadRequest>> take(const std::shared_ptr<RestoreJob>& job,
                                                     Clock::time_point deadline);

    /// Goes on with a step of a streamed job, which was fetched to `memory`, in this thread.
    void fetched(const std::shared_ptr<RestoreJob>& job, const RestoreStep& step,
                 Lease memory) noexcept;

    /// Fails all jobs with a shutdown fault, and takes no more.
    void stop();
    /// Then, when devices are done with what they were given: joins the threads. Returns the names
    /// of the jobs that storage holds up, if threads have not ended by `deadline`. Once.
    std::vector<std::string> join(Clock::time_point deadline);

  private:
    struct Task {
        RestoreJob::Pin job;
        std::optional<RestoreStep> step;  ///< none: let go of the job
        Lease memory;                     ///< what was read, if the step is to be used
    };

    void start_threads();
    void loop(NodeQueue<Task>& tasks);
    std::optional<Task> next_task(NodeQueue<Task>& tasks);
    void run(Task& task);
    void hand_over(const Task& task, Lease memory);
    void queue(const RestoreJob::Pin& job, const std::vector<RestoreStep>& steps);
    void use(const RestoreJob::Pin& job, const RestoreStep& step, Lease memory);
    Result<Lease> acquire_segment(const RestoreJob& job,
                                  Clock::time_point deadline = Clock::time_point::max());
    void copy_to_devices(const RestoreJob::Pin& job, RestoreJob::Writing writing, Lease memory,
                         std::map<int, DeviceWork> work);
    void let_go(NodeQueue<Task>::Node last);

    const std::shared_ptr<HostCache> cache_;
    const std::shared_ptr<Devices> devices_;
    const std::size_t reading_threads_;
    const std::size_t using_threads_;

    JobsInFlight<RestoreJob> jobs_;

    std::mutex mutex_;                 // guards what follows; taken before a job's
    std::condition_variable changed_;  // tasks_, read_, stopping_
    NodeQueue<Task> tasks_;            // bounded by what the plans read
    NodeQueue<Task> read_;             // bounded by the segments
    bool stopping_ = false;            // takes no jobs
    bool all_failed_ = false;          // threads end when no tasks are left
    bool ended_ = false;               // no thread takes tasks any more
    Crew threads_;                     // joined by `shutdown`; has its own lock, taken after mutex_
};

}  // namespace datastates
