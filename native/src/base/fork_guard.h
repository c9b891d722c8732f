// What a forked child must not do: touch locks, threads or condition variables that it has only as
// copies of its parent's, in whatever state the fork caught them.

#pragma once

#include <memory>
#include <utility>

#include "base/immovable.h"

namespace datastates {

/// How many forks lie between this process and the one that first asked. Counted by a handler of
/// pthread_atfork (a process id would not do: in a new pid namespace both may be 1).
unsigned fork_generation();

/// A shared object that belongs to the process that made it. In a forked child it is neither used
/// nor destroyed: it leaks, because even a condition variable's destructor may wait for ever for
/// waiters that exist only in the parent.
template <typename T>
class ProcessBound : public Immovable {  // NOLINT(cppcoreguidelines-special-member-functions)
  public:
    ProcessBound() : ProcessBound(nullptr) {}
    explicit ProcessBound(std::shared_ptr<T> object)
        : object_(std::move(object)), generation_(fork_generation()) {}
    ~ProcessBound() {
        if (here()) std::destroy_at(&object_);
    }

    /// True in the process that made it.
    [[nodiscard]] bool here() const { return generation_ == fork_generation(); }

    /// The object, or null in a forked child.
    [[nodiscard]] std::shared_ptr<T> get() const { return here() ? object_ : nullptr; }

    /// Gives the object up (in a forked child: leaks it).
    void reset() { take(); }

    /// Gives the object up to the caller (in a forked child: leaks it, and returns null).
    std::shared_ptr<T> take() { return here() ? std::move(object_) : nullptr; }

  private:
    union {
        std::shared_ptr<T> object_;  // in a union, so that the destructor above decides
    };
    unsigned generation_;
};

}  // namespace datastates
