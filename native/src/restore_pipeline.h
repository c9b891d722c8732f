// The threads that restore. Each takes a step, gets a segment, reads, verifies, scatters.

#pragma once

#include <condition_variable>
#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "host_cache.h"
#include "restore_job.h"

namespace datastates {

class RestorePipeline {
  public:
    RestorePipeline(std::shared_ptr<HostCache> cache, std::size_t threads);
    RestorePipeline(const RestorePipeline&) = delete;
    RestorePipeline& operator=(const RestorePipeline&) = delete;
    RestorePipeline(RestorePipeline&&) = delete;
    RestorePipeline& operator=(RestorePipeline&&) = delete;
    ~RestorePipeline() { shutdown(); }

    /// Starts the threads with the first job. False after `shutdown`.
    bool submit(const std::shared_ptr<RestoreJob>& job);

    /// Fails `job` and drops what is queued of it. Returns at once.
    void fail(const std::shared_ptr<RestoreJob>& job, Fault fault) noexcept;

    /// Fails all jobs with a shutdown fault and joins the threads. One call at a time.
    void shutdown();

  private:
    struct Task {
        RestoreJob::Pin job;
        RestoreStep step;
    };

    void loop();
    std::optional<Task> next_task();
    void run(const Task& task);
    MaybeFault acquire_segment(const RestoreJob& job, Lease& memory);

    const std::shared_ptr<HostCache> cache_;
    const std::size_t thread_count_;

    std::mutex mutex_;                 // guards what follows; taken before a job's
    std::condition_variable changed_;  // tasks_, stopping_
    std::list<Task> tasks_;  // bounded by what the plans read; a list, which is cut without fail
    std::vector<std::weak_ptr<RestoreJob>> jobs_;  // all that may be in flight
    bool stopping_ = false;
    std::vector<std::jthread> threads_;  // end when stopping_; joined by `shutdown`
};

}  // namespace datastates
