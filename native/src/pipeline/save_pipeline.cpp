#include "pipeline/save_pipeline.h"

#include <algorithm>
#include <exception>
#include <new>
#include <string>
#include <utility>

namespace datastates {
SavePipeline::SavePipeline(std::shared_ptr<HostCache> cache, std::shared_ptr<Devices> devices,
                           std::size_t copy_threads, std::size_t flush_threads,
                           std::uint64_t write_rate, IoPriority io_priority)
    : cache_(std::move(cache)),
      devices_(std::move(devices)),
      copy_threads_(copy_threads),
      flush_threads_(flush_threads),
      pace_(write_rate),
      io_priority_(io_priority) {}

bool SavePipeline::submit(const std::shared_ptr<SaveJob>& job) {
    job->window()->attach(weak_from_this());
    {
        const std::scoped_lock lock(mutex_);
        if (stopping_) return false;
        start_threads();
        jobs_.add(job);
        // Opened ahead of the first read, so that a full disk is found before anything is copied.
        queue_opening(job);
        if (job->file_count() > 0) {
            const auto place = std::ranges::upper_bound(unread_jobs_, job->order(), {},
                                                        [](const auto& j) { return j->order(); });
            unread_jobs_.insert(place, job);
        }
    }
    tasks_changed_.notify_all();
    wake_copy_threads();
    return true;
}

void SavePipeline::queue_opening(const std::shared_ptr<SaveJob>& job) {
    for (std::size_t file = 0; job->writes() && file < job->file_count(); ++file) {
        if (!job->is_written(file)) continue;
        tasks_.push_back({.job = SaveJob::Pin(job), .open = file, .write = std::nullopt});
    }
    if (job->file_count() == 0) {
        tasks_.push_back({.job = SaveJob::Pin(job), .open = std::nullopt, .write = std::nullopt});
    }
}

void SavePipeline::start_threads() {
    const auto self = shared_from_this();
    for (std::size_t i = threads_.size(); i < copy_threads_ + flush_threads_; ++i) {
        if (i < copy_threads_) {
            threads_.start("ds-copy-" + std::to_string(i), [self] { self->copy_loop(); });
        } else {
            threads_.start("ds-flush-" + std::to_string(i - copy_threads_),
                           [self] { self->flush_loop(); });
        }
    }
}

void SavePipeline::wake_copy_threads() {
    {
        const std::scoped_lock lock(mutex_);  // or a thread about to wait would miss it
        jobs_changed_.notify_all();
    }
    // Threads that wait for segments on behalf of a newer job look again.
    cache_->interrupt();
}

void SavePipeline::fail(const std::shared_ptr<SaveJob>& job, Fault fault) noexcept {
    SaveJob::Pin until_dropped(job);
    if (!job->fail(std::move(fault))) return;
    NodeQueue<Task>::Node end;
    try {
        end = NodeQueue<Task>::Node(
            {.job = SaveJob::Pin(job), .open = std::nullopt, .write = std::nullopt});
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): then it ends here
    }
    NodeQueue<Task> dropped;
    {
        const std::scoped_lock lock(mutex_);
        std::erase(unread_jobs_, job);
        dropped = tasks_.take_if([&](const Task& task) { return task.job.job() == job; });
    }
    dropped = {};
    // By a flush thread, not here: closing its files may take a while, or for ever. So its pin is
    // the last that is left of this.
    if (end) until_dropped = {};
    {
        const std::scoped_lock lock(mutex_);
        if (!ended_) tasks_.push_front(std::move(end));
    }
    tasks_changed_.notify_all();
    wake_copy_threads();
}

void SavePipeline::stop() {
    {
        const std::scoped_lock lock(mutex_);
        stopping_ = true;
        jobs_changed_.notify_all();
    }
    jobs_.for_all([this](const auto& job) { fail(job, shut_down()); });
    cache_->interrupt();
}

std::vector<std::string> SavePipeline::join(Clock::time_point deadline) {
    {
        const std::scoped_lock lock(mutex_);
        all_failed_ = true;
        tasks_changed_.notify_all();
    }
    // What is queued is left to a thread that storage holds up: it closes files, which may hang,
    // too.
    if (!threads_.join(deadline)) return jobs_.unfinished();
    NodeQueue<Task> left;  // destroyed after the lock
    const std::scoped_lock lock(mutex_);
    ended_ = true;
    std::swap(left, tasks_);
    return {};
}

// --- copy threads ------------------------------------------------------------------------------

void SavePipeline::copy_loop() {
    Clock::duration waited{};
    while (true) {
        const std::uint64_t epoch = cache_->epoch();
        const auto next = wait_for_open_job();
        if (!next) return;
        const auto asked = Clock::now();
        Lease memory = acquire_segment(next, epoch);
        waited += Clock::now() - asked;
        if (!memory) continue;  // something changed: an older job may have become readable
        auto reading = take_unit();
        if (!reading) continue;
        const auto& [job, taken] = *reading;
        job->waited(std::exchange(waited, {}));
        if (taken.last) wake_copy_threads();  // a newer, streamed job may be read now
        try {
            proceed(job, job->read(taken.unit, std::move(memory)));
        } catch (const std::exception&) {
            fail(job.job(), out_of_memory("copy"));
        }
    }
}

Lease SavePipeline::acquire_segment(const std::shared_ptr<SaveJob>& job, std::uint64_t epoch) {
    try {
        if (cache_->is_lost(Share::kSave)) {
            fail(job, cache_lost());
            return {};
        }
        return cache_->acquire(Share::kSave, job->order(), epoch);
    } catch (const std::bad_alloc&) {
        fail(job, out_of_memory("copy"));
        return {};
    }
}

void SavePipeline::proceed(const SaveJob::Pin& job, SaveJob::Gathered gathered) {
    if (!gathered.status.ok()) fail(job.job(), std::move(gathered.status).fault());
    if (gathered.unread) read_on_devices(job, std::move(*gathered.unread));
    write_later(job, std::move(gathered.writable));
}

void SavePipeline::write_later(const SaveJob::Pin& job, std::optional<ReadUnit> read) {
    if (!read) return;
    enqueue({.job = SaveJob::Pin(job.job()), .open = std::nullopt, .write = std::move(read)});
}

void SavePipeline::read_on_devices(const SaveJob::Pin& job, DeviceRead read) {
    struct Unread {
        NodeQueue<Task>::Node last;  // keeps the job
        DeviceRead read;
    };
    std::shared_ptr<Unread> reading;
    try {
        reading = std::make_shared<Unread>();
        reading->last = NodeQueue<Task>::Node({.job = SaveJob::Pin(job.job()),
                                               .open = std::nullopt,
                                               .write = std::nullopt,
                                               .let_go = true});
    } catch (const std::bad_alloc&) {
        job->end_read(std::move(read), true);
        throw;
    }
    reading->read = std::move(read);
    const auto done = [self = shared_from_this(), reading](CopyOutcome outcome) {
        const bool failed = !outcome.status.ok();
        const SaveJob::Pin& of = reading->last->job;
        if (failed) self->fail(of.job(), std::move(outcome.status).fault());
        if (!outcome.finished) reading->read.read.memory.abandon();
        try {
            auto gathered = of->end_read(std::move(reading->read), failed);
            if (!gathered.status.ok()) self->fail(of.job(), std::move(gathered.status).fault());
            self->write_later(of, std::move(gathered.writable));
        } catch (const std::exception&) {
            self->fail(of.job(), out_of_memory("copy"));
        }
        self->push_ahead(std::move(reading->last));
    };
    try {
        devices_->copy(
            Direction::kGather, {reading->read.read.memory.data(), kSegmentBytes},
            reading->read.work, job->fences(),
            [&](const auto& groups, const auto& events) { job->queued(groups, events); }, done);
    } catch (const std::bad_alloc&) {
        done({.status = out_of_memory("copy"), .finished = true});
    }
}

/// A job is let go so, and not in a thread of a device's: the last to let go of a failed job closes
/// its files, which may take for ever.
void SavePipeline::push_ahead(NodeQueue<Task>::Node task) {
    {
        const std::scoped_lock lock(mutex_);
        if (!ended_) tasks_.push_front(std::move(task));
    }
    tasks_changed_.notify_one();
}

bool SavePipeline::may_read(const std::shared_ptr<SaveJob>& job) const {
    return !job->streamed() || job == unread_jobs_.front();
}

std::shared_ptr<SaveJob> SavePipeline::wait_for_open_job() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
        const auto open = std::ranges::find_if(unread_jobs_, [this](const auto& job) {
            return may_read(job) && job->window()->is_open();
        });
        if (open != unread_jobs_.end()) return *open;
        if (unread_jobs_.empty()) {
            jobs_changed_.wait(lock);
        } else {
            auto next = Clock::time_point::max();
            for (const auto& job : unread_jobs_) {
                if (may_read(job)) next = std::min(next, job->window()->opened_at());
            }
            jobs_changed_.wait_until(lock, next);
        }
    }
    return nullptr;
}

std::optional<SavePipeline::Reading> SavePipeline::take_unit() {
    const std::scoped_lock lock(mutex_);
    for (auto next = unread_jobs_.begin(); next != unread_jobs_.end(); ++next) {
        if (!may_read(*next) || !(*next)->window()->is_open()) continue;
        SaveJob::Pin pin(*next);
        const auto taken = pin->take_unit();
        if (!taken) continue;  // it has failed, and is about to leave the list
        if (taken->last) unread_jobs_.erase(next);
        return Reading{.job = std::move(pin), .taken = *taken};
    }
    return std::nullopt;
}

// --- flush threads -----------------------------------------------------------------------------

void SavePipeline::flush_loop() {
    set_io_priority(io_priority_);
    while (auto task = next_task()) {
        try {
            run(*task);
        } catch (const std::exception&) {
            fail(task->job.job(), out_of_memory("write"));
        }
    }
}

std::optional<SavePipeline::Task> SavePipeline::next_task() {
    std::unique_lock lock(mutex_);
    tasks_changed_.wait(lock, [&] { return all_failed_ || !tasks_.empty(); });
    if (tasks_.empty()) return std::nullopt;
    return tasks_.pop_front();
}

void SavePipeline::enqueue(Task task) {
    {
        const std::scoped_lock lock(mutex_);
        // No thread would take it: lanes call this when the threads are gone, too. Dropped, it
        // keeps no job from its end, and all have failed by now.
        if (ended_) return;
        tasks_.push_back(std::move(task));
    }
    tasks_changed_.notify_one();
}

void SavePipeline::run(Task& task) {
    if (task.let_go || task.job->failed()) return;
    if (task.open) {
        auto opened = task.job->open_file(*task.open);
        if (!opened.ok()) fail(task.job.job(), std::move(opened).fault());
    } else if (task.write) {
        write(task.job, std::move(*task.write));
    } else {
        finish_job(task.job);
    }
}

void SavePipeline::write(const SaveJob::Pin& job, ReadUnit read) {
    const std::size_t file = read.unit.file;
    if (auto last = job->sum(read)) {
        enqueue({.job = SaveJob::Pin(job.job()), .open = std::nullopt, .write = std::move(last)});
    }
    if (!job->is_written(file)) {
        read.memory.release();
        if (job->unit_written(file) && job->file_finished()) finish_job(job);
        return;
    }
    if (job->fails_before(pace_.take(job->nbytes_of(read.unit)))) return;
    if (job->streamed()) {
        job->offer(std::move(read));
        return;
    }
    auto written = job->open_file(file);
    if (written.ok()) written = job->write(read);
    read.memory.release();
    if (written.ok() && job->unit_written(file) && !job->failed()) {
        written = job->finish_file(file);
        if (written.ok() && job->file_finished()) finish_job(job);
    }
    if (!written.ok()) fail(job.job(), std::move(written).fault());
}

void SavePipeline::finish_job(const SaveJob::Pin& job) {
    if (job->failed()) return;
    auto synced = job->sync_directories();
    if (synced.ok()) {
        job->succeed();
    } else {
        fail(job.job(), std::move(synced).fault());
    }
}

}  // namespace datastates
