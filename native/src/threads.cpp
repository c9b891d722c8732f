#include "threads.h"

#include <pthread.h>

#include <csignal>
#include <utility>

namespace datastates {

std::jthread start_thread(const std::string& name, std::function<void()> body) {
    // The thread inherits the mask, so there is no moment at which it could take a signal.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
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
