// The jobs that a pipeline has taken, for when they have to fail together.

#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/fault.h"
#include "pipeline/crew.h"

namespace datastates {

/// Any thread. `fail` is the pipeline's: it fails a job and drops what is queued of it.
template <typename Job>
class JobsInFlight {
  public:
    void add(const std::shared_ptr<Job>& job) {
        const std::scoped_lock lock(mutex_);
        std::erase_if(jobs_, [](const auto& weak) { return weak.expired(); });
        jobs_.push_back(job);
    }

    /// Calls `function` with each. When no more are added.
    template <typename Function>
    void for_all(const Function& function) {
        for (std::size_t i = 0;; ++i) {
            std::shared_ptr<Job> job;
            {
                const std::scoped_lock lock(mutex_);
                if (i == jobs_.size()) return;
                job = jobs_[i].lock();
            }
            if (job) function(job);
        }
    }

    /// Fails the jobs of `losses`, which are not empty, and all others, which would only wait for
    /// what those hold. When no more are added.
    template <typename Fail>
    void give_up(std::vector<typename Crew<Job>::Loss> losses, const Fail& fail) {
        const Fault first = copy_of(losses.front().fault);
        for (auto& [job, fault] : losses) {
            if (!job) continue;
            job->give_up(copy_of(fault));
            fail(job, std::move(fault));
        }
        for_all([&](const auto& job) {
            job->give_up(copy_of(first));
            fail(job, copy_of(first));
        });
        for (const auto& loss : losses) {
            if (loss.job) loss.job->lose_pin();
        }
    }

  private:
    std::mutex mutex_;  // guards what follows; taken after the pipeline's
    std::vector<std::weak_ptr<Job>> jobs_;
};

}  // namespace datastates
