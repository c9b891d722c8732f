#include "memory/gather.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "base/sizes.h"
#include "base/threads.h"

namespace datastates {
namespace {

/// Below this, starting threads costs more than they save.
constexpr std::uint64_t kParallelBytes = std::uint64_t{8} << 20U;
constexpr std::uint64_t kPieceBytes = std::uint64_t{2} << 20U;
constexpr std::uint64_t kMaxThreads = 4;

}  // namespace

void gather(const StreamContent& content, std::byte* out) {
    const std::uint64_t end = content.end();
    if (content.nbytes() <= kParallelBytes) {
        content.copy(Direction::kGather, {.begin = 0, .end = end}, out);
        return;
    }
    std::atomic<std::uint64_t> next = 0;
    const auto copy_pieces = [&] {
        while (true) {
            const std::uint64_t begin = next.fetch_add(kPieceBytes);
            if (begin >= end) return;
            const Range piece{.begin = begin, .end = std::min(begin + kPieceBytes, end)};
            content.copy(Direction::kGather, piece, out + begin);
        }
    };
    std::vector<std::jthread> helpers;  // joined on return
    const std::uint64_t wanted =
        std::clamp<std::uint64_t>(std::thread::hardware_concurrency(), 1, kMaxThreads);
    try {
        while (helpers.size() + 1 < wanted)
            helpers.push_back(start_thread("ds-gather", copy_pieces));
    } catch (const std::system_error&) {  // NOLINT(bugprone-empty-catch)
        // No more threads to be had: those that there are do the work.
    }
    copy_pieces();
}

}  // namespace datastates
