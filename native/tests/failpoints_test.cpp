// Failpoints: what is refused, who counts what, what each action does, and the log before it.

#include "files/failpoints.h"

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "check.h"
#include "support.h"

namespace datastates::testing {
namespace {

constexpr std::array<std::string_view, 2> kOperations{"flush.write", "read"};

Failpoints failpoints(std::string_view entries, std::string log = {}) {
    return {entries, kOperations, std::move(log)};
}

std::string text_of(const std::string& path) {
    const Bytes bytes = read_file(path);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void what_is_no_entry_is_refused() {
    for (const char* const entry :
         {"flush.write.before", "=kill", "flush.write.before=", "flush.write.before=die",
          "flush.write.before=sleep:", "flush.write.before=sleep:soon",
          "flush.write.before=sleep:1.2.3", "flush.write.before=sleep:inf",
          "flush.write.before=sleep:-1", "flush.write.before=error:", "flush.write.before=error:E",
          "flush.write.before=error:5", "flush.write.before=error:EWHATEVER",
          "flush.write.before@=kill", "flush.write.before@x=kill", "flush.write.before@-1=kill",
          "flush.write.before@99999999999999999999=kill", "Flush=kill", "flush write=kill", " ",
          // Of another's failpoint, too: a mistyped name must be told.
          "vote.before=die", "vote.before@=kill", "vote.before=error:eio"}) {
        check_throws<std::invalid_argument>(std::string("'") + entry + "'",
                                            [&] { failpoints(entry); });
        check_throws<std::invalid_argument>(
            entry, [&] { failpoints("read.before=sleep:0;" + std::string(entry)); });
    }
}

void names_of_others_are_ignored() {
    for (const char* const entries :
         {"", ";", ";;", "vote.before=kill",
          "vote.before@2=error:EWHATEVER;publish.rename.after=stop", "flush.write=kill",
          "flush.write.between=kill", "read.write.before=kill", "flush.writes.before=kill"}) {
        auto points = failpoints(entries);
        check(points.empty(), entries);
        check_equal(points.hit("vote.before"), 0);
    }
}

void an_error_is_returned_at_each_hit() {
    auto points = failpoints(" flush.write.after=error:ENOSPC ;");
    check(!points.empty());
    for (int i = 0; i < 3; ++i) {
        check_equal(points.hit("flush.write.after"), ENOSPC);
        check_equal(points.hit("flush.write.before"), 0);
        check_equal(points.hit("read.after"), 0);
        check_equal(points.hit("flush"), 0);
        check_equal(points.hit(""), 0);
    }
}

void errors_have_their_numbers() {
    const std::vector<std::pair<std::string, int>> errors{
        {"EIO", EIO},       {"ENOSPC", ENOSPC}, {"EDQUOT", EDQUOT}, {"EROFS", EROFS},
        {"EACCES", EACCES}, {"EFBIG", EFBIG},   {"ENOMEM", ENOMEM}, {"ESTALE", ESTALE}};
    for (const auto& [name, number] : errors) {
        check_equal(failpoints("read.before=error:" + name).hit("read.before"), number);
    }
}

void hits_are_counted_by_name_from_one() {
    auto points = failpoints(
        "flush.write.before@2=error:EIO;flush.write.before@4=error:ENOSPC;read.before@1=error:"
        "EPERM");
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
    auto points = failpoints("read.before@777=error:EIO");
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
    auto points = failpoints("read.before@2=sleep:0.05");
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
    auto points = failpoints("flush.write.after@2=error:EIO;read.before=sleep:0.0", log);
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
    auto points = failpoints("read.before=error:EIO", directory.file("missing/log"));
    check_equal(points.hit("read.before"), EIO);
}

/// What became of a child that came to `read.before` and would then exit with 7.
int status_of_child(const std::string& action, const std::string& log, int flags) {
    const pid_t child = ::fork();
    if (child == 0) {
        auto points = failpoints("read.before=" + action, log);
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
    const int status = status_of_child("kill", directory.file("log"), 0);
    check(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    check(text_of(directory.file("log")) == "read.before\n");
}

void stop_stops_the_process_there() {
    const TemporaryDirectory directory;
    const int status = status_of_child("stop", directory.file("log"), WUNTRACED);
    check(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
    check(text_of(directory.file("log")) == "read.before\n");
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases(
        {{"what_is_no_entry_is_refused", what_is_no_entry_is_refused},
         {"names_of_others_are_ignored", names_of_others_are_ignored},
         {"an_error_is_returned_at_each_hit", an_error_is_returned_at_each_hit},
         {"errors_have_their_numbers", errors_have_their_numbers},
         {"hits_are_counted_by_name_from_one", hits_are_counted_by_name_from_one},
         {"one_of_many_threads_gets_the_nth_hit", one_of_many_threads_gets_the_nth_hit},
         {"sleep_takes_its_time", sleep_takes_its_time},
         {"the_log_has_a_line_before_each_action", the_log_has_a_line_before_each_action},
         {"a_log_that_cannot_be_written_changes_nothing",
          a_log_that_cannot_be_written_changes_nothing},
         {"kill_ends_the_process_there", kill_ends_the_process_there},
         {"stop_stops_the_process_there", stop_stops_the_process_there}});
}
