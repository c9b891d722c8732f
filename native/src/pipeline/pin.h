// What keeps a job at work.

#pragma once

#include <memory>
#include <utility>

namespace datastates {

/// Calls `pin` of its job when it is made, and `unpin`, which does not throw, when it goes.
template <typename Job>
class JobPin {
  public:
    JobPin() = default;  ///< of no job
    explicit JobPin(std::shared_ptr<Job> job) : job_(std::move(job)) { job_->pin(); }
    JobPin(const JobPin&) = delete;
    JobPin& operator=(const JobPin&) = delete;
    JobPin(JobPin&& other) noexcept = default;
    JobPin& operator=(JobPin&& other) noexcept {
        if (this != &other) {
            release();
            job_ = std::move(other.job_);
        }
        return *this;
    }
    ~JobPin() { release(); }

    [[nodiscard]] const std::shared_ptr<Job>& job() const { return job_; }
    Job* operator->() const { return job_.get(); }

  private:
    void release() {
        if (const auto job = std::move(job_)) job->unpin();
        job_ = nullptr;
    }

    std::shared_ptr<Job> job_;
};

}  // namespace datastates
