// Failpoints: who counts what, what each action does, and the log before it.

#include "files/failpoints.h"

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "support.h"

namespace datastates::testing {
namespace {

void an_error_is_returned_at_each_hit() {
    Failpoints points({error_at("flush.write.after", ENOSPC)}, "");
    check(!points.empty());
    for (int i = 0; i < 3; ++i) {
        check_equal(points.hit("flush.write.after"), ENOSPC);
        check_equal(points.hit("flush.write.before"), 0);
        check_equal(points.hit("read.after"), 0);
        check_equal(points.hit("flush"), 0);
        check_equal(points.hit(""), 0);
    }
}

void actions_come_in_order_and_an_error_ends_them() {
    Failpoints points({sleep_at("read.before", 1), error_at("read.before", EIO),
                       sleep_at("read.before", 2), error_at("other", EPERM)},
                      "");
    std::vector<double> slept;
    const auto sleep = [&](auto time) { slept.push_back(time.count()); };
    check_equal(points.hit("read.before", sleep), EIO);
    check(slept == std::vector<double>{1});
}

void hits_are_counted_by_name_from_one() {
    Failpoints points(
        {error_at("flush.write.before", EIO, 2), error_at("flush.write.before", ENOSPC, 4),
         error_at("read.before", EPERM, 1)},
        "");
    const auto hit = [&] { return points.hit("flush.write.before"); };
    check_equal(hit(), 0);
    check_equal(points.hit("flush.write.after"), 0);
    check_equal(hit(), EIO);
    check_equal(points.hit("read.before"), EPERM);
    check_equal(points.hit("read.before"), 0);
    check_equal(hit(), 0);
    check_equal(hit(), ENOSPC);
    check_equal(hit(), 0);
}

void one_of_many_threads_gets_the_nth_hit() {
    constexpr int kThreads = 4;
    constexpr int kHits = 500;
    Failpoints points({error_at("read.before", EIO, 777)}, "");
    std::atomic<int> errors = 0;
    {
        std::vector<std::jthread> threads;
        for (int i = 0; i < kThreads; ++i) {
            threads.emplace_back([&] {
                for (int n = 0; n < kHits; ++n) errors += points.hit("read.before") == EIO ? 1 : 0;
            });
        }
    }
    check_equal(errors.load(), 1);
}

void sleep_takes_its_time() {
    Failpoints points({sleep_at("read.before", 0.05, 2)}, "");
    const auto begin = Clock::now();
    check_equal(points.hit("read.before"), 0);
    const auto between = Clock::now();
    check_equal(points.hit("read.before"), 0);
    check(Clock::now() - between >= std::chrono::milliseconds(50));
    check(between - begin < std::chrono::milliseconds(50), "the first hit does not sleep");
}

void the_log_has_a_line_before_each_action() {
    const TemporaryDirectory directory;
    const std::string log = directory.file("log");
    Failpoints points({error_at("flush.write.after", EIO, 2), sleep_at("read.before", 0)}, log);
    points.hit("flush.write.after");
    points.hit("flush.write.before");
    check(!std::filesystem::exists(log), "no action, no line");
    points.hit("flush.write.after");
    points.hit("read.before");
    points.hit("read.before");
    check(text_of(log) == "flush.write.after\nread.before\nread.before\n", text_of(log));
}

void a_log_that_cannot_be_written_changes_nothing() {
    const TemporaryDirectory directory;
    Failpoints points({error_at("read.before", EIO)}, directory.file("missing/log"));
    check_equal(points.hit("read.before"), EIO);
}

/// What became of a child that came to `read.before` and would then exit with 7.
int status_of_child(Failpoint::Action action, const std::string& log, int flags) {
    const pid_t child = ::fork();
    if (child == 0) {
        Failpoints points({{.name = "read.before", .nth = {}, .action = action}}, log);
        points.hit("read.before");
        ::_exit(7);
    }
    int status = 0;
    check(::waitpid(child, &status, flags) == child);
    if (WIFSTOPPED(status)) {
        check(::kill(child, SIGCONT) == 0);
        int ended = 0;
        check(::waitpid(child, &ended, 0) == child);
        check(WIFEXITED(ended) && WEXITSTATUS(ended) == 7, "it goes on when it is continued");
    }
    return status;
}

void kill_ends_the_process_there() {
    const TemporaryDirectory directory;
    const int status = status_of_child(Failpoint::Action::kKill, directory.file("log"), 0);
    check(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    check(text_of(directory.file("log")) == "read.before\n");
}

void stop_stops_the_process_there() {
    const TemporaryDirectory directory;
    const int status = status_of_child(Failpoint::Action::kStop, directory.file("log"), WUNTRACED);
    check(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
    check(text_of(directory.file("log")) == "read.before\n");
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<an_error_is_returned_at_each_hit, actions_come_in_order_and_an_error_ends_them,
                     hits_are_counted_by_name_from_one, one_of_many_threads_gets_the_nth_hit,
                     sleep_takes_its_time, the_log_has_a_line_before_each_action,
                     a_log_that_cannot_be_written_changes_nothing, kill_ends_the_process_there,
                     stop_stops_the_process_there>();
}
