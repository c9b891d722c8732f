#include "base/threads.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <utility>

namespace datastates {

std::jthread start_thread(const std::string& name, std::function<void()> body) {
    // The thread inherits the mask, so there is no moment at which it could take a signal.
    sigset_t blocked;
    sigset_t before;
    sigfillset(&blocked);
    // Left alone: a fault of the thread's own still reaches its handler (faulthandler, say).
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT})
        sigdelset(&blocked, own);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    try {
        std::jthread thread(std::move(body));
        pthread_setname_np(thread.native_handle(), name.c_str());
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return thread;
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
}

void set_io_priority(IoPriority priority) noexcept {
    if (priority == IoPriority::kNormal) return;
    // The C library has no names for them: ioprio_set(2).
    constexpr int kThread = 1;
    constexpr int kClassShift = 13;
    constexpr int kBestEffort = 2;
    constexpr int kIdleClass = 3;
    constexpr int kLast = 7;
    const bool idle = priority == IoPriority::kIdle;
    syscall(SYS_ioprio_set, kThread, 0,
            (idle ? kIdleClass : kBestEffort) << kClassShift | (idle ? 0 : kLast));
}

}  // namespace datastates
