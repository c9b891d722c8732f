// File operations that fail and leave a trace as asked: where each name is, and what is recorded.

#include "files/watched_file_ops.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "files/trace.h"
#include "pipeline/engine.h"
#include "support.h"

namespace datastates::testing {
namespace {

using Call = HookedFileOps::Call;

constexpr std::uint64_t kSize = 20 * kMiB + 12;

/// An engine with watched operations, and what reaches the system beneath them.
struct Watched {
    explicit Watched(const std::vector<Failpoint>& points, const std::string& trace_path = {})
        : engine(kSmallCache, {},
                 watched_file_ops(system, {.failpoints = std::make_shared<Failpoints>(
                                               points, directory.file("log")),
                                           .trace_path = trace_path})) {}

    std::optional<Fault> save() {
        const auto job = engine.save({SaveFile(directory.file("f"), kSize, source.transfer)},
                                     {directory.path()}, 0, open_window());
        check((*job)->wait_read(kEveryGroup, in(60)));
        check((*job)->wait(in(60)), "the job ends");
        check_all_free(engine.cache());
        check_equal(system->open_files(), 0U);
        return (*job)->fault();
    }

    std::optional<Fault> restore(const std::string& path) {
        Bytes out(kSize);
        const auto job = engine.restore({whole_file(path, out)});
        check((*job)->wait(in(60)), "the job ends");
        check_all_free(engine.cache());
        // A restore that failed is not waited for: the thread that lets go of it closes its files.
        wait_until("files stay open", [&] { return system->open_files() == 0; });
        return (*job)->fault();
    }

    [[nodiscard]] std::size_t calls(Call call) const {
        const auto trace = system->trace();
        return static_cast<std::size_t>(
            std::ranges::count(trace, call, &HookedFileOps::Event::call));
    }

    TemporaryDirectory directory;
    Source source{kSize, kMiB, 1};
    std::shared_ptr<HookedFileOps> system = std::make_shared<HookedFileOps>();
    Engine engine;
};

struct Place {
    const char* name;
    Call call;
    const char* operation;  // as the fault names it
};

const std::vector<Place>& places_of_saves() {
    static const std::vector<Place> places{{"flush.open", Call::kOpen, "open"},
                                           {"flush.allocate", Call::kAllocate, "fallocate"},
                                           {"flush.write", Call::kWrite, "write"},
                                           {"flush.truncate", Call::kTruncate, "ftruncate"},
                                           {"sync.data", Call::kSyncData, "fdatasync"},
                                           {"flush.close", Call::kClose, "close"},
                                           {"sync.directory", Call::kSync, "fsync"}};
    return places;
}

void check_fault(const std::optional<Fault>& fault, const Place& place) {
    check(fault.has_value(), place.name);
    check(fault->kind == FaultKind::kIo && fault->error == EIO, describe(*fault));
    check(fault->operation == place.operation, describe(*fault));
}

void an_error_before_fails_the_save_without_the_call() {
    for (const Place& place : places_of_saves()) {
        Watched watched({error_at(std::string(place.name) + ".before", EIO)});
        check_fault(watched.save(), place);
        const std::string line = std::string(place.name) + ".before\n";
        check(text_of(watched.directory.file("log")).starts_with(line), place.name);
        // A close is made all the same, or the descriptor would leak.
        if (place.call != Call::kClose) check_equal(watched.calls(place.call), 0U);
    }
}

void an_error_after_fails_the_save_though_the_call_was_made() {
    for (const Place& place : places_of_saves()) {
        Watched watched({error_at(std::string(place.name) + ".after", EIO, 1)});
        check_fault(watched.save(), place);
        check(text_of(watched.directory.file("log")) == std::string(place.name) + ".after\n");
        check(watched.calls(place.call) > 0, place.name);
    }
}

void an_open_that_fails_afterwards_leaves_the_file_but_no_descriptor() {
    Watched watched({error_at("flush.open.after", EMFILE)});
    const auto fault = watched.save();
    check(fault && fault->error == EMFILE && fault->operation == "open");
    check_equal(watched.calls(Call::kClose), 1U);
    check(std::filesystem::exists(watched.directory.file("f")));
}

void an_error_in_a_copy_thread_fails_the_save() {
    for (const std::string when : {"before", "after"}) {
        Watched watched({error_at("read." + when, ENOMEM, 2)});
        const auto fault = watched.save();
        check(fault && fault->kind == FaultKind::kIo && fault->error == ENOMEM);
        check(fault->operation == "copy" && fault->path == watched.directory.file("f"));
        check(text_of(watched.directory.file("log")) == "read." + when + "\n");
    }
}

void errors_reach_restores_by_names_of_their_own() {
    Watched fine(
        {error_at("restore.open.before", EIO, 100), error_at("flush.open.before", EIO, 2)});
    check(!fine.save());
    const std::string path = fine.directory.file("f");
    check(!fine.restore(path), "an open for reading is no flush.open");
    for (const Place& place :
         {Place{"restore.open", Call::kOpen, "open"}, Place{"restore.read", Call::kRead, "read"}}) {
        for (const std::string when : {".before", ".after"}) {
            Watched watched({error_at(place.name + when, EIO)});
            check_fault(watched.restore(path), place);
            check(!watched.save(), "saves have names of their own, too");
        }
    }
}

// --- the trace -----------------------------------------------------------------------------------

/// A line of the trace, taken apart by code that knows only what it should look like.
struct Line {
    std::string op;
    std::string path;
    std::string key;    // of the third field
    std::string value;  // of all after it
};

Line parse(const std::string& line) {
    std::istringstream in(line);
    const auto expect = [&](const std::string& words) {
        std::string found(words.size(), ' ');
        in.read(found.data(), static_cast<std::streamsize>(found.size()));
        check(found == words, line.substr(0, 200));
    };
    const auto quoted = [&] {
        std::string text;
        expect("\"");
        std::getline(in, text, '"');
        return text;
    };
    Line parsed;
    expect("{\"op\": ");
    parsed.op = quoted();
    expect(", \"path\": ");
    parsed.path = quoted();
    if (in.peek() == ',') {
        expect(", ");
        parsed.key = quoted();
        expect(": ");
        std::getline(in, parsed.value, '}');
    } else {
        expect("}");
    }
    check(in.peek() == std::istringstream::traits_type::eof(), "nothing follows the object");
    return parsed;
}

std::vector<Line> parse_file(const std::string& path) {
    const std::string text = text_of(path);
    check(text.ends_with('\n'));
    std::istringstream in(text);
    std::vector<Line> lines;
    for (std::string line; std::getline(in, line);) lines.push_back(parse(line));
    return lines;
}

int digit(char c) {
    return c <= '9' ? c - '0' : c - 'a' + 10;
}

void a_trace_is_enough_to_write_the_file_again() {
    const TemporaryDirectory traces;
    Watched watched({}, traces.file("trace"));
    check(!watched.save());
    const std::string path = watched.directory.file("f");
    Bytes file;
    std::string sync_id;
    std::vector<std::string> done;  // operations, repetitions left out
    for (const Line& line : parse_file(traces.file("trace"))) {
        if (done.empty() || done.back() != line.op) done.push_back(line.op);
        const bool of_file = done.size() <= 6;
        check(line.path == (of_file ? path : watched.directory.path()), line.path);
        if (line.op == "allocate" || line.op == "truncate") {
            check(line.key == "size");
            file.resize(std::stoull(line.value));
        } else if (line.op == "write") {
            check(line.key == "offset");
            constexpr std::string_view kData = R"(, "data": ")";
            const std::size_t data = line.value.find(kData);
            const std::uint64_t offset = std::stoull(line.value.substr(0, data));
            const std::string hex = line.value.substr(data + kData.size());
            check(hex.ends_with('"') && offset + hex.size() / 2 <= file.size());
            for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
                file[offset + i / 2] = std::byte(digit(hex[i]) * 16 + digit(hex[i + 1]));
            }
        } else if (line.op == "sync_begin") {
            check(line.key == "id" && line.value != sync_id);
            check(line.value.starts_with("\"" + std::to_string(::getpid()) + ".n"));
            sync_id = line.value;
        } else if (line.op == "sync") {
            check(line.key == "id" && line.value == sync_id);
        } else {
            check(line.op == "create" && line.key.empty());
        }
    }
    check(done == std::vector<std::string>{"create", "allocate", "write", "truncate", "sync_begin",
                                           "sync", "sync_begin", "sync"});
    check(file == reference_file(watched.source.stream));
    check(!watched.restore(path));
    check_equal(parse_file(traces.file("trace")).back().op == "sync", true);
}

void only_what_was_done_is_traced() {
    const TemporaryDirectory directory;
    const std::string trace = directory.file("trace");
    const auto ops = [&] {
        std::string all;
        for (const Line& line : parse_file(trace)) all += line.op + " ";
        std::filesystem::remove(trace);
        return all;
    };
    const auto system = std::make_shared<HookedFileOps>([](const HookedFileOps::Event& event) {
        if (event.call == Call::kAllocate) return HookedFileOps::failing(ENOSPC);
        if (event.call == Call::kSyncData) return HookedFileOps::failing(EIO);
        HookedFileOps::Instead instead;
        if (event.call == Call::kWrite) instead.cut = 3;
        return instead;
    });
    const std::vector<Failpoint> points{error_at("flush.write.before", EIO, 2),
                                        error_at("flush.truncate.after", EIO)};
    const auto watched = watched_file_ops(
        system, {.failpoints = std::make_shared<Failpoints>(points, ""), .trace_path = trace});
    const auto opened = watched->open(directory.file("f"), O_WRONLY | O_CREAT | O_EXCL, 0644);
    const int fd = static_cast<int>(opened.value);
    check(opened.ok() && ops() == "create ");
    check_equal(watched->allocate(fd, 8).error, ENOSPC);
    check_equal(watched->sync_data(fd).error, EIO);
    check(ops() == "sync_begin ", "begun, and never done");
    const Bytes data{std::byte{0x00}, std::byte{0x7f}, std::byte{0xff}, std::byte{0x01}};
    check_equal(watched->write(fd, data, 5).value, 3);
    check(text_of(trace) == R"({"op": "write", "path": ")" + directory.file("f") +
                                R"(", "offset": 5, "data": "007fff"})" + "\n",
          text_of(trace));
    std::filesystem::remove(trace);
    check_equal(watched->write(fd, data, 5).error, EIO);
    check(!std::filesystem::exists(trace), "a write that was not made");
    check_equal(watched->truncate(fd, 2).error, EIO);
    check(ops() == "truncate ", "made, and then reported as failed");
    check(watched->close(fd).ok());
    check(!watched->open(directory.file("none/f"), O_WRONLY | O_CREAT, 0644).ok());
    check(!std::filesystem::exists(trace));
}

void a_trace_that_cannot_be_written_fails_the_save() {
    const TemporaryDirectory empty;
    Watched watched({}, empty.file("none/trace"));
    const auto fault = watched.save();
    check(fault && fault->error == ENOENT && fault->operation == "open");
}

void strings_are_those_of_json() {
    check(json_string("plain /path") == R"("plain /path")");
    check(json_string("a\"b\\c\n\t\r\b\f\x01\x1f") == R"("a\"b\\c\n\t\r\b\f\u0001\u001f")");
    check(json_string(std::string_view("\0", 1)) == R"("\u0000")");
    check(json_string("é€😀\x7f\xff") == "\"é€😀\x7f\xff\"");
}

void nothing_is_watched_unless_asked_for() {
    const auto system = posix_file_ops();
    check(watched_file_ops(system, {}) == system);
    const auto none = std::make_shared<Failpoints>(std::vector<Failpoint>{}, "/log");
    check(watched_file_ops(system, {.failpoints = none, .trace_path = {}}) == system);
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<an_error_before_fails_the_save_without_the_call,
                     an_error_after_fails_the_save_though_the_call_was_made,
                     an_open_that_fails_afterwards_leaves_the_file_but_no_descriptor,
                     an_error_in_a_copy_thread_fails_the_save,
                     errors_reach_restores_by_names_of_their_own,
                     a_trace_is_enough_to_write_the_file_again, only_what_was_done_is_traced,
                     a_trace_that_cannot_be_written_fails_the_save, strings_are_those_of_json,
                     nothing_is_watched_unless_asked_for>();
}
