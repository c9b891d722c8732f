// The threads of a pipeline, and how they end: joined, or given up in a file operation that never
// returns.

#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/fault.h"
#include "base/immovable.h"
#include "base/threads.h"
#include "files/abandonable_file_ops.h"

namespace datastates {

/// Each member works on one job at a time, with one pin of it.
///
/// A member that is given up is detached, which no other thread ever is: it may sit in the system
/// until the process has ended. Its stack and all that this keeps alive remain as they are: the
/// pipeline, the job, the segment that the system may still read or fill.
template <typename Job>
class Crew : public Immovable {
  public:
    class Member : public Immovable {
      public:
        explicit Member(std::mutex& mutex) : mutex_(mutex) {}

        /// What this thread has a pin of, until it says otherwise. For the member itself.
        void works_on(std::weak_ptr<Job> job) {
            const std::scoped_lock lock(mutex_);
            job_.swap(job);
        }

      private:
        friend class Crew;

        std::mutex& mutex_;       // the crew's; guards what follows
        std::weak_ptr<Job> job_;  // alive as long as there is a pin
        std::jthread thread_;
        bool running_ = true;  // and not given up
    };

    /// What a member that was given up worked on, and in what it was.
    struct Loss {
        std::shared_ptr<Job> job;
        Fault fault;
    };

    explicit Crew(std::shared_ptr<AbandonableFileOps> ops) : ops_(std::move(ops)) {}

    /// Starts a thread. `body` keeps alive what it uses, this crew too.
    void start(const std::string& name, std::function<void(Member&)> body) {
        const std::scoped_lock lock(mutex_);
        Member& member = members_.emplace_back(mutex_);
        try {
            member.thread_ = start_thread(name, [this, &member, run = std::move(body)] {
                run(member);
                const std::scoped_lock ended(mutex_);
                member.running_ = false;
                ended_.notify_all();
            });
        } catch (...) {
            members_.pop_back();
            throw;
        }
    }

    /// How many were started.
    [[nodiscard]] std::size_t size() const {
        const std::scoped_lock lock(mutex_);
        return members_.size();
    }

    /// Gives up the members whose file operation patience is over for. Those that memory runs out
    /// for are left to the next call.
    std::vector<Loss> give_up_stuck() noexcept {
        std::vector<Loss> losses;
        try {
            const std::scoped_lock lock(mutex_);
            losses.reserve(members_.size());
            for (Member& member : members_) {
                if (!member.running_) continue;
                auto fault = ops_->abandon(member.thread_.get_id());
                if (!fault) continue;
                member.running_ = false;
                member.thread_.detach();
                ended_.notify_all();
                losses.push_back({.job = member.job_.lock(), .fault = std::move(*fault)});
            }
        } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): the next call
        }
        return losses;
    }

    /// Returns when all have ended or were given up. `look` is called while they have not.
    template <typename Look>
    void join(const Look& look) {
        constexpr std::chrono::milliseconds kPoll(50);
        std::list<Member> members;
        std::unique_lock lock(mutex_);
        const auto all_ended = [&] { return std::ranges::none_of(members_, &Member::running_); };
        while (!ended_.wait_for(lock, kPoll, all_ended)) {
            lock.unlock();
            look();
            lock.lock();
        }
        members.swap(members_);
        lock.unlock();
        members.clear();  // joins
    }

  private:
    const std::shared_ptr<AbandonableFileOps> ops_;
    mutable std::mutex mutex_;       // guards what follows; taken before the file operations'
    std::condition_variable ended_;  // running_ of some member
    std::list<Member> members_;      // a list: members know their place
};

}  // namespace datastates
