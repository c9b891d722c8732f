#include "memory/arena.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "base/sizes.h"

namespace datastates {
namespace {

constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20U;

/// False if the calling thread may not, or there is no such node.
bool run_on_node(int node) {
    std::ifstream file("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    char after = 0;
    for (unsigned first = 0; file >> first; file >> after) {  // such as 0-15,32-47
        unsigned last = first;
        if (file.peek() == '-') file >> after >> last;
        for (unsigned cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &cpus);
    }
    return CPU_COUNT(&cpus) > 0 && ::sched_setaffinity(0, sizeof(cpus), &cpus) == 0;
}

}  // namespace

Arena::Arena(std::uint64_t nbytes) : nbytes_(nbytes) {
    // mmap aligns to pages only: map a little more, and give back both ends.
    const std::uint64_t mapped = nbytes + kHugePage;
    if (mapped < nbytes) throw std::bad_alloc();
    void* const start =
        ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) throw std::bad_alloc();
    auto* const first = static_cast<std::byte*>(start);
    const std::uint64_t misaligned = reinterpret_cast<std::uintptr_t>(first) % kHugePage;
    const std::uint64_t before = misaligned == 0 ? 0 : kHugePage - misaligned;
    data_ = first + before;
    if (before > 0) ::munmap(first, before);
    ::munmap(data_ + nbytes, mapped - before - nbytes);
    ::madvise(data_, nbytes, MADV_HUGEPAGE);  // only advice: where refused, small pages do
    if (::madvise(data_, nbytes, MADV_DONTFORK) != 0) {
        ::munmap(data_, nbytes);
        throw std::bad_alloc();
    }
}

Arena::Arena(Arena&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), nbytes_(other.nbytes_) {}

Arena::~Arena() {
    if (data_ != nullptr) ::munmap(data_, nbytes_);
}

void fault_in(std::span<std::byte> memory) {
    constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE; older headers lack it
    if (::madvise(memory.data(), memory.size(), kPopulateWrite) != 0) touch_pages(memory);
}

void touch_pages(std::span<std::byte> memory) {
    constexpr std::uint64_t kPage = 4096;
    for (std::uint64_t at = 0; at < memory.size(); at += kPage) {
        auto& byte = reinterpret_cast<unsigned char&>(memory[at]);
        std::atomic_ref(byte).fetch_or(0, std::memory_order_relaxed);
    }
}

Status prefer_node(int node) {
    constexpr int kPreferred = 1;  // MPOL_PREFERRED
    constexpr int kBits = std::numeric_limits<unsigned long>::digits;
    if (node < 0 || node >= kBits) return {};
    const unsigned long nodes = 1UL << static_cast<unsigned>(node);
    // The kernel reads one bit less than it is told of.
    if (::syscall(SYS_set_mempolicy, kPreferred, &nodes, kBits + 1) == 0) return {};
    const int error = errno;
    try {
        Fault fault;
        fault.error = error;
        fault.operation = "set_mempolicy for NUMA node " + std::to_string(node);
        fault.detail = run_on_node(node) ? "the thread runs on the CPUs of that node instead"
                                         : "nor can the thread run on the CPUs of that node";
        return fault;
    } catch (const std::bad_alloc&) {
        return out_of_memory("set_mempolicy");
    }
}

}  // namespace datastates
