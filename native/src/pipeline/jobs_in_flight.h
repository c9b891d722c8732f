// The jobs that a pipeline has taken, for when they have to fail together.

#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace datastates {

/// Any thread.
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

    /// The names of those that are not done.
    std::vector<std::string> unfinished() {
        std::vector<std::string> names;
        for_all([&](const auto& job) {
            if (!job->done()) names.push_back(job->name());
        });
        return names;
    }

  private:
    std::mutex mutex_;  // guards what follows; taken after the pipeline's
    std::vector<std::weak_ptr<Job>> jobs_;
};

}  // namespace datastates
