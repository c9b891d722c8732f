// File operations that do not return: at the end, jobs fail by name, all waits end, and a thread
// that comes back late touches nothing.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "check.h"
#include "files/watched_file_ops.h"
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
    void wait_returned() {
        std::unique_lock lock(mutex_);
        check(changed_.wait_until(lock, in(60), [&] { return stuck_ == 0; }), operation_);
    }
    [[nodiscard]] int calls() const { return calls_; }

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
        ++calls_;
        if (name != operation_) return operation();
        std::unique_lock lock(mutex_);
        ++stuck_;
        changed_.notify_all();
        changed_.wait(lock, [&] { return released_; });
        lock.unlock();
        const SysResult result = operation();
        lock.lock();
        --stuck_;
        changed_.notify_all();
        return result;
    }

    const std::string operation_;
    const std::shared_ptr<FileOps> system_ = posix_file_ops();
    std::atomic<int> calls_ = 0;
    std::mutex mutex_;  // guards what follows
    std::condition_variable changed_;
    int stuck_ = 0;
    bool released_ = false;
};

/// An engine whose `operation` is stuck, and memory to save and to restore into.
struct Scene {
    explicit Scene(std::string_view operation, ThreadCounts threads = {},
                   Clock::duration patience = kPatience)
        : ops(std::make_shared<StuckFileOps>(operation)),
          engine(std::make_unique<Engine>(kCache, threads, ops, nullptr, patience)) {
        write_file(directory.file("saved"), reference_file(source->stream));
    }

    [[nodiscard]] std::shared_ptr<SaveHandle> save(const std::string& name,
                                                   std::uint64_t order = 0) const {
        return engine->save(
            {SaveFile(directory.file(name), source->stream.size(), source->transfer)},
            {directory.path()}, order, open_window());
    }
    [[nodiscard]] std::shared_ptr<RestoreHandle> restore() const {
        Transfer transfer;
        transfer.add(0, kSize, out->data(), 0);
        return engine->restore(
            {RestoreFile(directory.file("saved"), file_bytes(kSize), kSize, transfer)});
    }

    /// All that jobs use goes; then the operation returns, and its thread does nothing any more.
    void check_late_return_is_harmless() {
        engine.reset();
        source.reset();
        out.reset();
        const int calls = ops->calls();
        ops->release();
        ops->wait_returned();
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        check_equal(ops->calls(), calls);
    }

    TemporaryDirectory directory;
    std::shared_ptr<StuckFileOps> ops;
    std::unique_ptr<Source> source = std::make_unique<Source>(kSize, kMiB, 1);
    std::unique_ptr<Bytes> out = std::make_unique<Bytes>(kSize);
    std::unique_ptr<Engine> engine;
};

void check_stuck(const std::optional<Fault>& fault, const std::string& operation,
                 const std::string& path) {
    check(fault.has_value(), operation + " did not fail the job");
    const std::string words = describe(*fault);
    check(fault->kind == FaultKind::kStuck, words);
    check(fault->operation == operation, words);
    check(fault->path == path, words);
    check(words.starts_with(operation + " of '" + path + "' has not returned for "), words);
    check(words.ends_with(" s; given up as the process ends"), words);
    check(kind_name(fault->kind) == "io" && fault->error == ETIMEDOUT);
}

void check_takes_about_patience(Clock::time_point since) {
    const auto took = Clock::now() - since;
    check(took >= kPatience && took < kPatience + std::chrono::seconds(30), "it is patient");
}

void a_save_ends_before(const std::string& operation) {
    Scene scene(operation);
    const auto job = scene.save("f");
    scene.ops->wait_stuck();
    if (operation == "close") {  // at its end, as the file's last operation
        check((*job)->wait_read(kEveryGroup, in(60)));
    }
    const auto limited = Clock::now();
    scene.engine->limit_file_patience();
    scene.engine->limit_file_patience();
    check((*job)->wait(in(60)), operation);
    check_takes_about_patience(limited);
    const auto path = operation == "fsync" ? scene.directory.path() : scene.directory.file("f");
    check_stuck((*job)->fault(), operation, path);
    check((*job)->wait_read(kEveryGroup, in(60)), operation);
    check(!scene.engine->given_up().empty());
    check_throws<std::runtime_error>("shut down", [&] { static_cast<void>(scene.save("g")); });
    const auto began = Clock::now();
    scene.engine->shutdown();
    check(Clock::now() - began < kPatience + std::chrono::seconds(30));
}

void stuck_saves_end_in_time() {
    for (const char* operation : {"open", "fcntl", "fallocate", "pwrite", "sync_file_range",
                                  "ftruncate", "fdatasync", "close", "fsync"}) {
        a_save_ends_before(operation);
    }
}

void stuck_restores_end_in_time() {
    for (const std::string operation : {"open", "fcntl", "fstat", "pread"}) {
        Scene scene(operation);
        const auto restore = scene.restore();
        scene.ops->wait_stuck();
        const auto limited = Clock::now();
        scene.engine->limit_file_patience();
        check((*restore)->wait(in(60)), operation);
        check_takes_about_patience(limited);
        check_stuck((*restore)->fault(), operation, scene.directory.file("saved"));
        scene.engine->shutdown();
    }
}

void a_restore_whose_file_does_not_close_is_done() {
    Scene scene("close");
    const auto restore = scene.restore();
    scene.ops->wait_stuck();
    check(!(*restore)->wait(in(0.1)));
    scene.engine->limit_file_patience();
    check((*restore)->wait(in(60)));
    check(!(*restore)->fault(), "all was restored");
    check(*scene.out == scene.source->stream);
    scene.check_late_return_is_harmless();
}

void a_failed_save_whose_file_does_not_close_ends() {
    Scene scene("close");
    const auto job =
        scene.engine->save({SaveFile(scene.directory.file("f"), kSize, scene.source->transfer)}, {},
                           0, std::make_shared<Window>(in(600)));
    while (!std::filesystem::exists(scene.directory.file("f"))) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // it is open, or soon
    job->cancel();  // returns at once: others close the file
    scene.ops->wait_stuck();
    check(!(*job)->wait(in(0.1)));
    scene.engine->shutdown();
    check((*job)->wait(Clock::now()));
    check_stuck((*job)->fault(), "close", scene.directory.file("f"));
    scene.check_late_return_is_harmless();
}

void late_returns_touch_nothing() {
    for (const char* operation : {"open", "pwrite", "ftruncate", "fdatasync", "fsync"}) {
        Scene scene(operation);
        auto job = scene.save("f");
        scene.ops->wait_stuck();
        scene.engine->shutdown();
        job.reset();
        scene.check_late_return_is_harmless();
    }
    for (const char* operation : {"open", "fstat", "pread"}) {
        Scene scene(operation);
        auto job = scene.restore();
        scene.ops->wait_stuck();
        scene.engine->limit_file_patience();
        job.reset();  // waits until nothing writes to its memory
        scene.check_late_return_is_harmless();
    }
}

void a_shutdown_alone_is_patient_and_bounded() {
    Scene scene("pwrite", {.copy = 2, .flush = 2});
    const auto stuck = scene.save("f");
    scene.ops->wait_stuck(2);  // both threads write f, so that the fault below is f's
    const auto behind = scene.save("g", 1);
    const auto began = Clock::now();
    scene.engine->shutdown();
    check_takes_about_patience(began);
    check((*stuck)->wait(Clock::now()));
    check((*behind)->wait(Clock::now()));
    check_stuck((*stuck)->fault(), "pwrite", scene.directory.file("f"));
    check_equal(scene.engine->given_up().size(), 2U);
}

void what_waits_behind_a_stuck_save_ends_with_it() {
    Scene scene("pwrite", {.copy = 2, .flush = 2});
    const auto stuck = scene.save("f");
    scene.ops->wait_stuck(2);
    std::vector<std::shared_ptr<SaveHandle>> behind;
    for (std::uint64_t i = 1; i < 6; ++i) behind.push_back(scene.save(std::to_string(i), i));
    scene.engine->limit_file_patience();
    for (const auto& job : behind) {
        check((*job)->wait(in(60)));
        check((*job)->wait_read(kEveryGroup, in(60)));
        check_stuck((*job)->fault(), "pwrite", scene.directory.file("f"));
    }
    check((*stuck)->wait(in(60)));
    behind.clear();
    scene.check_late_return_is_harmless();
}

void operations_that_return_in_time_are_not_given_up() {
    const Scene scene("pwrite", {}, kLongPatience);
    const auto job = scene.save("f");
    scene.ops->wait_stuck();
    scene.engine->limit_file_patience();
    check(!(*job)->wait(in(0.2)));
    scene.ops->release();
    check((*job)->wait(in(60)));
    check(!(*job)->fault());
    check(scene.engine->given_up().empty());
    check(read_file(scene.directory.file("f")) == reference_file(scene.source->stream));
    check_all_free(scene.engine->cache());
}

void nothing_is_given_up_before_the_end() {
    const Scene scene("pwrite");
    const auto job = scene.save("f");
    scene.ops->wait_stuck();
    check(!(*job)->wait(Clock::now() + 2 * kPatience));
    scene.ops->release();
    check((*job)->wait(in(60)));
    check(!(*job)->fault());
}

void restores_go_on_when_saves_are_given_up() {
    const Scene scene("ftruncate");
    const auto job = scene.save("f");
    scene.ops->wait_stuck();
    scene.engine->limit_file_patience();
    check((*job)->wait(in(60)));
    const auto restore = scene.restore();
    check((*restore)->wait(in(60)));
    const auto fault = (*restore)->fault();
    check(!fault || fault->kind == FaultKind::kStuck, "or the machine was that slow");
    if (!fault) check(*scene.out == scene.source->stream);
}

void a_shutdown_waits_for_what_returns_in_time() {
    const Scene scene("fdatasync", {}, kLongPatience);
    const auto job = scene.save("f");
    scene.ops->wait_stuck();
    const std::jthread releases([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        scene.ops->release();
    });
    scene.engine->shutdown();
    check((*job)->wait(Clock::now()));
    check((*job)->fault()->kind == FaultKind::kShutdown);
    check(scene.engine->given_up().empty());
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

void a_failpoint_that_sleeps_is_given_up() {
    const TemporaryDirectory directory;
    const Source source(kSize, kMiB, 1);
    const std::vector<Failpoint> points{sleep_at("flush.write.before", 1000)};
    const Watch watch{.failpoints = std::make_shared<Failpoints>(points, ""), .trace_path = {}};
    Engine engine(kCache, {}, watched_file_ops(posix_file_ops(), watch), nullptr, kPatience);
    const auto job =
        engine.save({SaveFile(directory.file("f"), kSize, source.transfer)}, {}, 0, open_window());
    check((*job)->wait_read(kEveryGroup, in(60)));
    engine.limit_file_patience();
    check((*job)->wait(in(60)));
    check_stuck((*job)->fault(), "pwrite", directory.file("f"));
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
    scene.engine->shutdown();
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
    return run_cases(
        {{"stuck_saves_end_in_time", stuck_saves_end_in_time},
         {"stuck_restores_end_in_time", stuck_restores_end_in_time},
         {"a_restore_whose_file_does_not_close_is_done",
          a_restore_whose_file_does_not_close_is_done},
         {"a_failed_save_whose_file_does_not_close_ends",
          a_failed_save_whose_file_does_not_close_ends},
         {"late_returns_touch_nothing", late_returns_touch_nothing},
         {"a_shutdown_alone_is_patient_and_bounded", a_shutdown_alone_is_patient_and_bounded},
         {"what_waits_behind_a_stuck_save_ends_with_it",
          what_waits_behind_a_stuck_save_ends_with_it},
         {"operations_that_return_in_time_are_not_given_up",
          operations_that_return_in_time_are_not_given_up},
         {"nothing_is_given_up_before_the_end", nothing_is_given_up_before_the_end},
         {"restores_go_on_when_saves_are_given_up", restores_go_on_when_saves_are_given_up},
         {"a_shutdown_waits_for_what_returns_in_time", a_shutdown_waits_for_what_returns_in_time},
         {"a_file_that_does_not_open_keeps_no_other_thread",
          a_file_that_does_not_open_keeps_no_other_thread},
         {"a_failpoint_that_sleeps_is_given_up", a_failpoint_that_sleeps_is_given_up},
         {"a_process_with_stuck_threads_ends_with_its_own_status",
          a_process_with_stuck_threads_ends_with_its_own_status}});
}
