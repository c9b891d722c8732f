#include "hostility.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>
#include <vector>

namespace datastates::fake_cuda {

Door::Passage Door::enter(bool engine) {
    Passage passage(*this);
    if (!closed_) return passage;
    if (!passage.lock_.try_lock()) {
        const bool behind_engine = !engine && engine_inside_;
        const auto began = Clock::now();
        passage.lock_.lock();
        if (behind_engine) waited(Clock::now() - began);
    }
    engine_inside_ = engine;
    return passage;
}

void Door::waited(Clock::duration time) {
    auto longest = longest_.load();
    while (longest < time && !longest_.compare_exchange_weak(longest, time)) {
    }
}

std::uint64_t pages_not_faulted_in(const Addresses& memory) {
    const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
    const std::uintptr_t begin = memory.begin / page * page;
    const std::uintptr_t nbytes = memory.end - begin;
    std::vector<unsigned char> resident((nbytes + page - 1) / page);
    if (::mincore(bytes_at(begin), nbytes, resident.data()) != 0) return 0;
    return static_cast<std::uint64_t>(
        std::ranges::count_if(resident, [](unsigned char each) { return (each & 1U) == 0; }));
}

bool prefers_a_node() {
    constexpr int kPreferred = 1;
    int mode = 0;
    return ::syscall(SYS_get_mempolicy, &mode, nullptr, 0, nullptr, 0) == 0 && mode == kPreferred;
}

bool hostile_by_environment() {
    const char* const hostile = std::getenv("FAKE_CUDA_HOSTILE");
    return hostile != nullptr && std::string_view(hostile) == "1";
}

}  // namespace datastates::fake_cuda
