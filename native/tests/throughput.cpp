// Prints how fast a save and a restore are:
// throughput [cache MiB] [directory] [data MiB] [files] [copy threads] [flush threads]
// With NO_FALLOCATE in the environment: without preallocation; with NO_WRITES: all but the writes
// themselves, to see what the engine alone can do (the restore then fails).

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "pipeline/engine.h"
#include "support.h"

namespace {

using datastates::Clock;
using datastates::testing::in;
using datastates::testing::kMiB;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

int main(int argc, char** argv) {
    using namespace datastates;
    const std::vector<std::string> arguments(argv + 1, argv + argc);
    const auto number = [&](std::size_t i, std::uint64_t otherwise) {
        return i < arguments.size() ? std::stoull(arguments[i]) : otherwise;
    };
    const std::uint64_t cache = number(0, 3072) * kMiB;
    const std::string directory = arguments.size() > 1 ? arguments[1] : "/tmp";
    const std::uint64_t size = number(2, 2048) * kMiB;
    const std::uint64_t file_count = number(3, 1);
    const std::uint64_t copy_threads = number(4, 2);
    const std::uint64_t flush_threads = number(5, 4);
    auto memory = testing::random_bytes(size, 1);
    const bool no_fallocate = std::getenv("NO_FALLOCATE") != nullptr;
    const bool no_writes = std::getenv("NO_WRITES") != nullptr;
    std::shared_ptr<FileOps> ops = posix_file_ops();
    if (no_fallocate || no_writes) {
        using Call = testing::HookedFileOps::Call;
        ops = std::make_shared<testing::HookedFileOps>([=](const auto& event) {
            testing::HookedFileOps::Instead instead;
            if (no_fallocate && event.call == Call::kAllocate) {
                instead.result = SysResult{.value = -1, .error = EOPNOTSUPP};
            }
            if (no_writes && event.call == Call::kWrite) {
                instead.result = SysResult{.value = static_cast<std::int64_t>(event.size)};
            }
            return instead;
        });
    }
    Engine engine(cache, {.copy = copy_threads, .flush = flush_threads}, ops);
    const std::uint64_t per_file = size / file_count / 4096 * 4096;
    for (int round = 0; round < 5; ++round) {
        std::vector<SaveFile> files;
        std::vector<RestoreFile> back;
        for (std::uint64_t i = 0; i < file_count; ++i) {
            const std::string path = directory + "/throughput-" + std::to_string(i);
            std::filesystem::remove(path);
            Transfer transfer;
            transfer.add(0, per_file, memory.data() + i * per_file, 0);
            files.emplace_back(path, per_file, transfer);
            back.emplace_back(path, files.back().nbytes(), per_file, transfer);
        }
        const auto start = Clock::now();
        const auto save = engine.save(files, {directory}, 0, testing::open_window());
        const double submitted = seconds_since(start);
        (*save)->wait_read(kEveryGroup, in(600));
        const double read = seconds_since(start);
        (*save)->wait(in(600));
        const double durable = seconds_since(start);
        const auto restore_start = Clock::now();
        const auto restore = engine.restore(back);
        (*restore)->wait(in(600));
        const double restored = seconds_since(restore_start);
        const double gigabytes = static_cast<double>(size) / 1e9;
        std::printf(
            "submit %.3f ms, read %.0f ms, durable %.0f ms (%.2f GB/s, %s); restore %.0f ms (%.2f "
            "GB/s)%s\n",
            submitted * 1e3, read * 1e3, durable * 1e3, gigabytes / durable,
            (*save)->direct() ? "direct" : "buffered", restored * 1e3, gigabytes / restored,
            (*save)->fault() || (*restore)->fault() ? " FAILED" : "");
    }
    return EXIT_SUCCESS;
}
