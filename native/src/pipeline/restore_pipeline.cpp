#include "pipeline/restore_pipeline.h"

#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <utility>

namespace datastates {

ReadRequest::ReadRequest(std::shared_ptr<RestorePipeline> pipeline, std::shared_ptr<RestoreJob> job,
                         Fetch fetch, Lease memory)
    : pipeline_(std::move(pipeline)),
      job_(std::move(job)),
      fetch_(std::move(fetch)),
      memory_(std::move(memory)) {}

ReadRequest::~ReadRequest() {
    if (memory_) pipeline_->fail(job_, cancelled());
}

void ReadRequest::fill(std::span<const std::byte> bytes) {
    std::memcpy(memory_.data(), bytes.data(), bytes.size());
    pipeline_->fetched(job_, fetch_.step, std::move(memory_));
}

RestorePipeline::RestorePipeline(std::shared_ptr<HostCache> cache, std::shared_ptr<Devices> devices,
                                 std::size_t threads)
    : cache_(std::move(cache)),
      devices_(std::move(devices)),
      reading_threads_(threads),
      using_threads_((threads + 1) / 2) {}

bool RestorePipeline::submit(const std::shared_ptr<RestoreJob>& job) {
    const RestoreJob::Pin until_queued(job);  // a plan of no files is done when this goes
    {
        const std::scoped_lock lock(mutex_);
        if (stopping_) return false;
        start_threads();
        jobs_.add(job);
    }
    queue(until_queued, job->first_steps());
    return true;
}

void RestorePipeline::fail(const std::shared_ptr<RestoreJob>& job, Fault fault) noexcept {
    const RestoreJob::Pin until_dropped(job);
    if (!job->fail(std::move(fault))) return;
    const auto is_of_job = [&](const Task& task) { return task.job.job() == job; };
    NodeQueue<Task> dropped;  // destroyed after the lock, as is what follows
    NodeQueue<Task> dropped_segments;
    {
        const std::scoped_lock lock(mutex_);
        dropped = tasks_.take_if(is_of_job);
        dropped_segments = read_.take_if(is_of_job);
    }
    cache_->interrupt();  // threads that wait for a segment on its behalf
}

void RestorePipeline::stop() {
    {
        const std::scoped_lock lock(mutex_);
        stopping_ = true;
        changed_.notify_all();
    }
    jobs_.for_all([this](const auto& job) { fail(job, shut_down()); });
    cache_->interrupt();
}

std::vector<std::string> RestorePipeline::join(Clock::time_point deadline) {
    {
        const std::scoped_lock lock(mutex_);
        all_failed_ = true;
        changed_.notify_all();
    }
    if (!threads_.join(deadline)) return jobs_.unfinished();
    const std::scoped_lock lock(mutex_);
    ended_ = true;
    return {};
}

/// With mutex_ held. A call that fails leaves the rest to the next one.
void RestorePipeline::start_threads() {
    for (std::size_t i = threads_.size(); i < reading_threads_ + using_threads_; ++i) {
        const bool reads = i < reading_threads_;
        const std::string name = reads ? "ds-restore-" + std::to_string(i)
                                       : "ds-place-" + std::to_string(i - reading_threads_);
        threads_.start(name, [self = shared_from_this(), reads] {
            self->loop(reads ? self->tasks_ : self->read_);
        });
    }
}

void RestorePipeline::loop(NodeQueue<Task>& tasks) {
    while (auto task = next_task(tasks)) {
        try {
            run(*task);
        } catch (const std::exception&) {  // only memory can have run out
            fail(task->job.job(), out_of_memory("read"));
        }
    }
}

std::optional<RestorePipeline::Task> RestorePipeline::next_task(NodeQueue<Task>& tasks) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return all_failed_ || !tasks.empty(); });
    if (tasks.empty()) return std::nullopt;
    return tasks.pop_front();
}

void RestorePipeline::run(Task& task) {
    if (!task.step) return;
    if (task.memory) {
        use(task.job, *task.step, std::move(task.memory));
        return;
    }
    // Not simply left to `shutdown`: if this was the last step, the job would have succeeded.
    auto memory = acquire_segment(*task.job.job());
    if (task.job->failed()) return;
    if (!memory.ok()) {
        fail(task.job.job(), std::move(memory).fault());
        return;
    }
    auto read = task.job->read(*task.step, memory->data());
    if (!read.ok()) {
        fail(task.job.job(), std::move(read).fault());
    } else if (task.step->table || task.job->from_page_cache(*task.step)) {
        use(task.job, *task.step, *std::move(memory));
    } else {
        hand_over(task, *std::move(memory));
    }
}

/// To the threads that use what was read.
void RestorePipeline::hand_over(const Task& task, Lease memory) {
    Task read{.job = RestoreJob::Pin(task.job.job()),
              .step = task.step,
              .memory = std::move(memory)};  // destroyed after the lock
    {
        const std::scoped_lock lock(mutex_);
        if (task.job->failed()) return;
        read_.push_back(std::move(read));
    }
    changed_.notify_all();
}

void RestorePipeline::use(const RestoreJob::Pin& job, const RestoreStep& step, Lease memory) {
    auto writing = job->begin_writing();
    if (!writing) return;
    auto next = job->use(step, memory.data());
    if (!next.ok()) {
        fail(job.job(), std::move(next).fault());
        return;
    }
    auto& [steps, work] = *next;
    if (!work.empty()) {
        copy_to_devices(job, std::move(writing), std::move(memory), std::move(work));
    }
    if (!steps.empty()) queue(job, steps);
}

void RestorePipeline::queue(const RestoreJob::Pin& job, const std::vector<RestoreStep>& steps) {
    if (job->streamed()) {
        job->queue(steps);
        return;
    }
    {
        const std::scoped_lock lock(mutex_);
        if (job->failed()) return;
        // When stopping, too: they keep the job from its end until `shutdown` has failed it.
        for (const RestoreStep& step : steps) {
            tasks_.push_back({.job = RestoreJob::Pin(job.job()), .step = step, .memory = {}});
        }
    }
    changed_.notify_all();
}

std::optional<std::shared_ptr<ReadRequest>> RestorePipeline::take(
    const std::shared_ptr<RestoreJob>& job, Clock::time_point deadline) {
    try {
        auto [ended, fetch] = job->take_fetch(deadline);
        if (ended) return nullptr;
        if (!fetch) return std::nullopt;
        auto memory = acquire_segment(*job, deadline);
        if (!memory.ok()) {
            fail(job, std::move(memory).fault());
            return nullptr;
        }
        if (*memory) {
            return std::make_shared<ReadRequest>(shared_from_this(), job, *std::move(fetch),
                                                 *std::move(memory));
        }
        if (job->failed()) return nullptr;
        job->put_back(*fetch);
        return std::nullopt;
    } catch (const std::bad_alloc&) {
        fail(job, out_of_memory("read"));
        return nullptr;
    }
}

void RestorePipeline::fetched(const std::shared_ptr<RestoreJob>& job, const RestoreStep& step,
                              Lease memory) noexcept {
    const RestoreJob::Pin pin(job);
    if (!job->end_fetch()) return;
    try {
        use(pin, step, std::move(memory));
    } catch (const std::exception&) {  // only memory can have run out
        fail(job, out_of_memory("read"));
    }
}

/// The segment, and the job, are kept until the devices are done with it.
void RestorePipeline::copy_to_devices(const RestoreJob::Pin& job, RestoreJob::Writing writing,
                                      Lease memory, std::map<int, DeviceWork> work) {
    struct Copying {
        NodeQueue<Task>::Node last;  // keeps the job
        RestoreJob::Writing writing;
        Lease memory;
        std::map<int, DeviceWork> work;
    };
    const auto copying = std::make_shared<Copying>();
    copying->last =
        NodeQueue<Task>::Node({.job = RestoreJob::Pin(job.job()), .step = {}, .memory = {}});
    copying->writing = std::move(writing);
    copying->memory = std::move(memory);
    copying->work = std::move(work);
    devices_->copy(
        Direction::kScatter, {copying->memory.data(), kSegmentBytes}, copying->work, job->fences(),
        [](const auto&, const auto&) {},
        [self = shared_from_this(), copying](CopyOutcome outcome) {
            const auto& of = copying->last->job.job();
            if (!outcome.status.ok()) self->fail(of, std::move(outcome.status).fault());
            if (!outcome.finished) copying->memory.abandon();
            copying->memory.release();
            copying->writing.reset();
            self->let_go(std::move(copying->last));
        });
}

/// Not in a thread of a device's: the last to let go of a job closes its files, which may take for
/// ever.
void RestorePipeline::let_go(NodeQueue<Task>::Node last) {
    {
        const std::scoped_lock lock(mutex_);
        if (!ended_) tasks_.push_front(std::move(last));
    }
    changed_.notify_all();  // one kind of threads takes it, and both wait
}

/// None if the job has failed, or after `deadline`.
Result<Lease> RestorePipeline::acquire_segment(const RestoreJob& job, Clock::time_point deadline) {
    Lease memory;
    while (!memory) {
        const std::uint64_t epoch = cache_->epoch();
        {
            const std::scoped_lock lock(mutex_);
            if (stopping_) return shut_down();
        }
        if (job.failed() || Clock::now() >= deadline) return memory;
        if (cache_->is_lost(Share::kRestore)) return cache_lost();
        memory = cache_->acquire(Share::kRestore, 0, epoch, deadline);
    }
    return memory;
}

}  // namespace datastates
