#include "base/fork_guard.h"

#include <pthread.h>

#include <atomic>

namespace datastates {
namespace {

// Trivially destructible, so usable until the very end of the process.
std::atomic<unsigned> generation{0};  // NOLINT(*-avoid-non-const-global-variables)

}  // namespace

unsigned fork_generation() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });
    static_cast<void>(registered);
    return generation.load(std::memory_order_relaxed);
}

}  // namespace datastates
