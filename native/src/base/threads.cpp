#include "base/threads.h"

#include <pthread.h>

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

}  // namespace datastates
