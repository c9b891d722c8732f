// File operations that do not return: a shutdown ends in time and names their jobs, nothing waits
// for them that need not, and a thread that comes back late touches nothing that is gone.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "check.h"
#include "pipeline/engine.h"
#include "support.h"

namespace datastates::testing {
namespace {

constexpr std::uint64_t kCache = 12 * kSegmentBytes;
constexpr std::uint64_t kSize = kSegmentBytes + kMiB;
constexpr std::chrono::milliseconds kPatience(300);
constexpr std::chrono::seconds kLongPatience(60);  // whatever else the machine does

/// The system's operations, of which those called `operation` do not return before `release`.
class StuckFileOps final : public FileOps {
  public:
    explicit StuckFileOps(std::string_view operation) : operation_(operation) {}

    void release() {
        const std::scoped_lock lock(mutex_);
        released_ = true;
        changed_.notify_all();
    }
    void wait_stuck(int threads = 1) {
        std::unique_lock lock(mutex_);
        check(changed_.wait_until(lock, in(60), [&] { return stuck_ >= threads; }), operation_);
    }

    SysResult open(const std::string& path, int flags, mode_t mode) override {
        return pass("open", [&] { return system_->open(path, flags, mode); });
    }
    SysResult set_direct(int fd, bool direct) override {
        return pass("fcntl", [&] {
            // Through the page cache, if that is what is to get stuck.
            if (operation_ == "sync_file_range") return SysResult{.value = -1, .error = EINVAL};
            return system_->set_direct(fd, direct);
        });
    }
    SysResult size(int fd) override {
        return pass("fstat", [&] { return system_->size(fd); });
    }
    SysResult allocate(int fd, std::uint64_t nbytes) override {
        return pass("fallocate", [&] { return system_->allocate(fd, nbytes); });
    }
    SysResult write(int fd, std::span<const std::byte> data, std::uint64_t offset) override {
        return pass("pwrite", [&] { return system_->write(fd, data, offset); });
    }
    SysResult read(int fd, std::span<std::byte> data, std::uint64_t offset) override {
        return pass("pread", [&] {
            std::ranges::fill(data, std::byte{1});  // crashes if the memory is gone
            return system_->read(fd, data, offset);
        });
    }
    SysResult start_writeback(int fd, Range range) override {
        return pass("sync_file_range", [&] { return system_->start_writeback(fd, range); });
    }
    SysResult wait_writeback(int fd, Range range) override {
        return pass("sync_file_range", [&] { return system_->wait_writeback(fd, range); });
    }
    SysResult drop_cached(int fd, Range range) override {
        return pass("posix_fadvise", [&] { return system_->drop_cached(fd, range); });
    }
    SysResult truncate(int fd, std::uint64_t nbytes) override {
        return pass("ftruncate", [&] { return system_->truncate(fd, nbytes); });
    }
    SysResult sync_data(int fd) override {
        return pass("fdatasync", [&] { return system_->sync_data(fd); });
    }
    SysResult sync(int fd) override {
        return pass("fsync", [&] { return system_->sync(fd); });
    }
    SysResult close(int fd) override {
        return pass("close", [&] { return system_->close(fd); });
    }

  private:
    template <typename Operation>
    SysResult pass(std::string_view name, const Operation& operation) {
        if (name != operation_) return operation();
        std::unique_lock lock(mutex_);
        ++stuck_;
        changed_.notify_all();
        changed_.wait(lock, [&] { return released_; });
        lock.unlock();
        return operation();
    }

    const std::string operation_;
    const std::shared_ptr<FileOps> system_ = posix_file_ops();
    std::mutex mutex_;  // guards what follows
    std::condition_variable changed_;
    int stuck_ = 0;
    bool released_ = false;
};

/// An engine whose `operation` is stuck, and memory to save and to restore into.
struct Scene {
    explicit Scene(std::string_view operation, ThreadCounts threads = {})
        : ops(std::make_shared<StuckFileOps>(operation)),
          engine(std::make_unique<Engine>(kCache, threads, ops)) {
        write_file(directory.file("saved"), reference_file(source->stream));
    }

    [[nodiscard]] std::shared_ptr<SaveHandle> save(const std::string& name,
                                                   std::uint64_t order = 0) const {
        return engine->save(
            {SaveFile(directory.file(name), source->stream.size(), source->transfer)},
            {directory.path()}, order, open_window());
    }
    [[nodiscard]] std::shared_ptr<RestoreHandle> restore() const {
        return engine->restore({whole_file(directory.file("saved"), *out)});
    }

    /// The engine and the sources go; then the operation returns, and its thread ends.
    void check_late_return_is_harmless() {
        const std::weak_ptr<HostCache> cache = engine->shared_cache();
        engine.reset();
        source.reset();
        check(!cache.expired(), "the operation may use its segment");
        ops->release();
        const auto deadline = in(60);
        while (!cache.expired() && Clock::now() < deadline) std::this_thread::yield();
        check(cache.expired(), "the last thread takes all with it");
    }

    TemporaryDirectory directory;
    std::shared_ptr<StuckFileOps> ops;
    std::unique_ptr<Source> source = std::make_unique<Source>(kSize, kMiB, 1);
    std::unique_ptr<Bytes> out = std::make_unique<Bytes>(kSize);
    std::unique_ptr<Engine> engine;
};

void check_takes_about_patience(Clock::time_point since) {
    const auto took = Clock::now() - since;
    check(took >= kPatience && took < kPatience + std::chrono::seconds(30), "it is patient");
}

/// Ends the engine, which says that `name` is held up.
void check_shutdown_names(const Scene& scene, const std::string& name) {
    const auto began = Clock::now();
    const auto held_up = scene.engine->shutdown(kPatience);
    check_takes_about_patience(began);
    check_equal(held_up.size(), 1U);
    check(held_up.front() == scene.directory.file(name), held_up.front());
    check(scene.engine->shutdown(kPatience).empty(), "it says so once");
}

void a_shutdown_leaves_stuck_saves_which_touch_nothing_when_they_return() {
    for (const char* operation : {"open", "fcntl", "fallocate", "pwrite", "sync_file_range",
                                  "ftruncate", "fdatasync", "close", "fsync"}) {
        Scene scene(operation);
        auto job = scene.save("f");
        scene.ops->wait_stuck();
        check_shutdown_names(scene, "f");
        check((*job)->wait_read(kEveryGroup, in(60)), operation);
        check(!(*job)->done(), operation);
        check((*job)->fault()->kind == FaultKind::kShutdown, operation);
        job.reset();  // waits only for what reads its sources
        scene.check_late_return_is_harmless();
    }
}

void a_shutdown_leaves_stuck_restores_which_touch_nothing_when_they_return() {
    for (const char* operation : {"open", "fcntl", "fstat", "pread"}) {
        Scene scene(operation);
        auto job = scene.restore();
        scene.ops->wait_stuck();
        check_shutdown_names(scene, "saved");
        check((*job)->wait(in(60)), operation);
        check((*job)->fault()->kind == FaultKind::kShutdown, operation);
        job.reset();
        scene.check_late_return_is_harmless();
        check(*scene.out == Bytes(kSize), "what was read late goes nowhere");
    }
}

void a_cancelled_restore_waits_for_no_file_operation() {
    for (const char* operation : {"open", "fcntl", "fstat", "pread"}) {
        Scene scene(operation);
        auto job = scene.restore();
        scene.ops->wait_stuck();
        check(!(*job)->wait(in(0.05)), operation);
        job->cancel();
        check((*job)->wait(in(60)), operation);
        job.reset();
        scene.ops->release();
        check(scene.engine->shutdown().empty(), operation);
        check(*scene.out == Bytes(kSize), "what was read late goes nowhere");
    }
}

void a_failed_save_whose_file_does_not_close_keeps_no_caller() {
    Scene scene("close");
    auto job =
        scene.engine->save({SaveFile(scene.directory.file("f"), kSize, scene.source->transfer)}, {},
                           0, std::make_shared<Window>(in(600)));
    while (!std::filesystem::exists(scene.directory.file("f"))) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // it is open, or soon
    job->cancel();  // returns at once: others close the file
    scene.ops->wait_stuck();
    check(!(*job)->wait(in(0.1)));
    check_shutdown_names(scene, "f");
    job.reset();
    scene.check_late_return_is_harmless();
}

void what_waits_behind_stuck_saves_fails_with_the_shutdown() {
    Scene scene("pwrite", {.copy = 2, .flush = 2});
    const auto stuck = scene.save("f");
    scene.ops->wait_stuck(2);
    std::vector<std::shared_ptr<SaveHandle>> behind;
    for (std::uint64_t i = 1; i < 6; ++i) behind.push_back(scene.save(std::to_string(i), i));
    check(!scene.engine->shutdown(kPatience).empty());
    for (const auto& job : behind) {
        check((*job)->wait_read(kEveryGroup, in(60)));
        check((*job)->fault()->kind == FaultKind::kShutdown);
    }
    behind.clear();
    // What is queued behind them is theirs to end: their files are closed when storage answers.
    scene.ops->release();
    check((*stuck)->wait(in(60)));
    check((*stuck)->fault()->kind == FaultKind::kShutdown);
}

void what_a_stuck_save_has_is_used_again_when_it_returns() {
    const Scene scene("pwrite");
    const auto job = scene.save("f");
    scene.ops->wait_stuck();
    job->cancel();
    check(!(*job)->wait(in(0.1)), "a thread is at work on its files");
    check(scene.engine->cache().stats().free_segments < kCache / kSegmentBytes);
    const auto restore = scene.restore();
    check((*restore)->wait(in(60)), "loads go on meanwhile");
    check(*scene.out == scene.source->stream);
    scene.ops->release();
    check((*job)->wait(in(60)));
    check_all_free(scene.engine->cache());
    const auto next = scene.save("g", 1);
    check_durable(*next);
}

void a_shutdown_waits_for_what_returns_in_time() {
    const Scene scene("fdatasync");
    const auto job = scene.save("f");
    scene.ops->wait_stuck();
    const std::jthread releases([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        scene.ops->release();
    });
    check(scene.engine->shutdown(kLongPatience).empty());
    check((*job)->wait(Clock::now()));
    check((*job)->fault()->kind == FaultKind::kShutdown);
    check_equal(scene.engine->cache().stats().free_segments, kCache / kSegmentBytes);
}

void a_file_that_does_not_open_keeps_no_other_thread() {
    Scene scene("open", {.copy = 2, .flush = 2});
    const auto stuck = scene.save("f");
    scene.ops->wait_stuck();
    // The other thread has a segment of the file by now, or soon: it waits for the opening.
    check((*stuck)->wait_read(kEveryGroup, in(60)));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    stuck->cancel();
    const auto next = scene.engine->save({}, {}, 1, open_window());
    check((*next)->wait(in(60)), "a thread is there for it");
    check(!(*stuck)->done());
    scene.ops->release();
    check((*stuck)->wait(in(60)));
    check((*stuck)->fault()->kind == FaultKind::kCancelled);
}

constexpr int kStatus = 7;

/// What the processes of the next case do: end with threads that are stuck; or with some that come
/// back while the process exits, if `late`.
int end_with_stuck_threads(bool late) try {
    static std::shared_ptr<StuckFileOps> released;
    const Scene scene("pwrite");
    if (late) {
        released = scene.ops;
        std::atexit([] {
            released->release();
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
        });
    }
    const auto job = scene.save("f");
    scene.ops->wait_stuck();
    check(!scene.engine->shutdown(kPatience).empty());
    return kStatus;
} catch (const std::exception& error) {
    (void)std::fprintf(stderr, "%s\n", error.what());
    return 1;
}

void a_process_with_stuck_threads_ends_with_its_own_status() {
    for (const char* when : {"never", "late"}) {
        const pid_t child = fork();
        if (child == 0) {
            execl("/proc/self/exe", "stuck_files_test", when, nullptr);  // NOLINT(*-vararg)
            _exit(1);
        }
        int status = 0;
        const auto deadline = in(60);
        while (waitpid(child, &status, WNOHANG) == 0) {
            if (Clock::now() > deadline) kill(child, SIGKILL);
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        check(WIFEXITED(status), when);
        check_equal(WEXITSTATUS(status), kStatus);
    }
}

}  // namespace
}  // namespace datastates::testing

int main(int argc, char** argv) {
    using namespace datastates::testing;
    if (argc > 1) return end_with_stuck_threads(std::string_view(argv[1]) == "late");
    return run_cases<a_shutdown_leaves_stuck_saves_which_touch_nothing_when_they_return,
                     a_shutdown_leaves_stuck_restores_which_touch_nothing_when_they_return,
                     a_cancelled_restore_waits_for_no_file_operation,
                     a_failed_save_whose_file_does_not_close_keeps_no_caller,
                     what_waits_behind_stuck_saves_fails_with_the_shutdown,
                     what_a_stuck_save_has_is_used_again_when_it_returns,
                     a_shutdown_waits_for_what_returns_in_time,
                     a_file_that_does_not_open_keeps_no_other_thread,
                     a_process_with_stuck_threads_ends_with_its_own_status>();
}
