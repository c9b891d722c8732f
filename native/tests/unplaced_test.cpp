// Saves that are read before it is known where their files go.

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "pipeline/engine.h"
#include "support.h"

namespace datastates::testing {
namespace {

using Call = HookedFileOps::Call;
using Event = HookedFileOps::Event;
using Instead = HookedFileOps::Instead;

constexpr std::uint64_t kCache = kMinSegments * kSegmentBytes;
constexpr std::uint64_t kFits = 2 * kSegmentBytes + 12;  // into what saves have of the cache
constexpr std::uint64_t kDoesNotFit = 40 * kMiB;

std::shared_ptr<SaveHandle> read_unplaced(Engine& engine, const Source& source, std::uint64_t order,
                                          std::shared_ptr<Window> window = open_window()) {
    return engine.save_unplaced({SaveFile("unplaced", source.stream.size(), source.transfer)},
                                order, window);
}

std::shared_ptr<SaveHandle> save(Engine& engine, const std::string& path, const Source& source,
                                 std::uint64_t order, std::shared_ptr<Window> window) {
    return engine.save({SaveFile(path, source.stream.size(), source.transfer)}, {}, order, window);
}

void check_durable(SaveHandle& job) {
    check(job->wait(in(60)), "the job ends");
    const auto fault = job->fault();
    check(!fault, fault ? describe(*fault) : "");
}

/// Until copy threads wait for segments.
void wait_until_full(const Engine& engine) {
    wait_until("the cache is full", [&] { return engine.cache().stats().waiting > 0; });
}

void reads_end_and_sources_change_before_the_files_have_paths() {
    const TemporaryDirectory directory;
    const auto ops = std::make_shared<HookedFileOps>();
    Engine engine(kCache, {}, ops);
    Source source(kFits, kMiB, 1);
    const Bytes expected = reference_file(source.stream);
    const auto job = read_unplaced(engine, source, 0);
    check((*job)->wait_read(kEveryGroup, in(60)));
    std::ranges::fill(source.memory, std::byte{0x5A});
    check(!(*job)->wait(in(0.1)), "nothing is durable yet");
    check(ops->trace().empty(), "no file was touched");
    check_equal((*job)->bytes_written(), 0U);
    job->place({.paths = {directory.file("f")}, .sync_directories = {directory.path()}});
    check_durable(*job);
    check(read_file(directory.file("f")) == expected);
    check(ops->trace().back().path == directory.path(), "the directory is synced at last");
    check(!std::filesystem::exists("unplaced"));
    check_all_free(engine.cache());
}

void files_are_opened_first_and_written_as_they_were_read() {
    const TemporaryDirectory directory;
    const auto ops = std::make_shared<HookedFileOps>();
    Engine engine(2 * kCache, {.copy = 1, .flush = 1, .restore = 1}, ops);
    const Source a(kFits, kMiB, 1);
    const Source b(kSegmentBytes - 4, kMiB, 2);
    const auto job = engine.save_unplaced(
        {SaveFile("a", kFits, a.transfer), SaveFile("b", b.stream.size(), b.transfer)}, 0,
        open_window());
    check((*job)->wait_read(kEveryGroup, in(60)));
    job->place({.paths = {directory.file("a"), directory.file("b")}, .sync_directories = {}});
    check_durable(*job);
    std::vector<std::string> done;
    for (const Event& event : ops->trace()) {
        if (event.call != Call::kOpen && event.call != Call::kWrite) continue;
        done.push_back((event.call == Call::kOpen ? "open " : "write ") +
                       std::filesystem::path(event.path).filename().string() + " " +
                       std::to_string(event.offset / kSegmentBytes));
    }
    // Each file's last segment waits for the checksums of those before it. b's table does not fit
    // into its only segment.
    const std::vector<std::string> expected{"open a 0",  "open b 0",  "write a 0", "write a 1",
                                            "write b 0", "write b 1", "write a 2"};
    check(done == expected, done.empty() ? "nothing" : done.back());
}

void a_save_larger_than_the_cache_goes_on_when_placed() {
    const TemporaryDirectory directory;
    Engine engine(kCache);
    const Source source(kDoesNotFit, kMiB, 1);
    const auto job = read_unplaced(engine, source, 0);
    wait_until_full(engine);
    check(!(*job)->wait_read(kEveryGroup, in(0.1)));
    job->place({.paths = {directory.file("f")}, .sync_directories = {directory.path()}});
    check_durable(*job);
    check(read_file(directory.file("f")) == reference_file(source.stream));
    check_all_free(engine.cache());
}

void a_save_without_files_is_done_when_placed() {
    const TemporaryDirectory directory;
    const auto ops = std::make_shared<HookedFileOps>();
    Engine engine(kCache, {}, ops);
    const auto job = engine.save_unplaced({}, 0, open_window());
    check((*job)->wait_read(kEveryGroup, in(60)));
    check(!(*job)->wait(in(0.1)));
    job->place({.paths = {}, .sync_directories = {directory.path()}});
    check_durable(*job);
    check(ops->trace().front().path == directory.path());
}

void a_save_may_be_placed_before_its_window_opens() {
    const TemporaryDirectory directory;
    Engine engine(kCache);
    const Source source(kFits, kMiB, 1);
    const auto window = std::make_shared<Window>(in(600));
    const auto job = read_unplaced(engine, source, 0, window);
    job->place({.paths = {directory.file("f")}, .sync_directories = {}});
    check(!(*job)->wait(in(0.1)));
    check_equal((*job)->bytes_read(), 0U);
    window->open();
    check_durable(*job);
    check(read_file(directory.file("f")) == reference_file(source.stream));
}

void a_wrong_placement_changes_nothing() {
    const TemporaryDirectory directory;
    Engine engine(kCache);
    const Source source(kFits, kMiB, 1);
    const SaveFile file("unplaced", kFits, source.transfer);
    const auto refused = [](SaveHandle& job, const std::string& words,
                            std::vector<std::string> paths) {
        check_throws<std::invalid_argument>(
            words, [&] { job.place({.paths = std::move(paths), .sync_directories = {}}); });
    };
    const auto job = engine.save_unplaced({file, file}, 0, open_window());
    const auto a = directory.file("a");
    const auto b = directory.file("b");
    refused(*job, "1 entries, and the save 2 files", {a});
    refused(*job, "3 entries", {a, b, directory.file("c")});
    refused(*job, "empty", {a, ""});
    refused(*job, "NUL", {a, b + '\0'});
    refused(*job, "twice", {a, a});
    job->place({.paths = {a, b}, .sync_directories = {}});
    refused(*job, "placed before", {a, b});
    check_durable(*job);
    refused(*job, "placed before", {a, b});
    check(read_file(b) == reference_file(source.stream));
    const auto placed = save(engine, directory.file("placed"), source, 1, open_window());
    refused(*placed, "placed before", {a});
    check_durable(*placed);
}

void a_failed_save_parks_nothing_and_is_never_placed() {
    const TemporaryDirectory directory;
    const auto ops = std::make_shared<HookedFileOps>();
    Engine engine(kCache, {}, ops);
    const Source source(kDoesNotFit, kMiB, 1);
    const auto job = read_unplaced(engine, source, 0);
    wait_until_full(engine);
    job->cancel();
    check((*job)->wait(in(60)));
    check_all_free(engine.cache());
    job->place({.paths = {directory.file("f")}, .sync_directories = {directory.path()}});
    check((*job)->fault()->kind == FaultKind::kCancelled);
    check(ops->trace().empty());
    check(!std::filesystem::exists(directory.file("f")));
}

void a_dropped_handle_leaves_nothing_parked() {
    Engine engine(kCache);
    for (const std::uint64_t size : {std::uint64_t{0}, kFits, kDoesNotFit}) {
        auto source = std::make_unique<Source>(size, kMiB, 1);
        auto job = read_unplaced(engine, *source, 0);
        static_cast<void>((*job)->wait_read(kEveryGroup, in(0.1)));
        job.reset();
        source.reset();
        check_all_free(engine.cache());
    }
    engine.save_unplaced({}, 0, open_window()).reset();
}

void faults_name_the_path_that_the_file_has() {
    const TemporaryDirectory directory;
    std::atomic<bool> reads_fail = true;
    const auto ops = std::make_shared<HookedFileOps>([&](const Event& event) {
        if (event.call != Call::kGather || !reads_fail) return Instead{};
        return Instead{.result = SysResult{.value = -1, .error = EIO}, .cut = {}};
    });
    Engine engine(kCache, {}, ops);
    const Source source(kFits, kMiB, 1);
    const auto unread = read_unplaced(engine, source, 0);
    check((*unread)->wait(in(60)), "a failed read needs no place");
    check((*unread)->fault()->path == "unplaced");
    reads_fail = false;
    const auto unwritten = read_unplaced(engine, source, 1);
    check((*unwritten)->wait_read(kEveryGroup, in(60)));
    const auto path = directory.file("none/f");
    unwritten->place({.paths = {path}, .sync_directories = {}});
    check((*unwritten)->wait(in(60)));
    check((*unwritten)->fault()->path == path);
    check_equal((*unwritten)->fault()->error, ENOENT);
    check_all_free(engine.cache());
}

void what_is_parked_holds_no_older_save_up() {
    const TemporaryDirectory directory;
    Engine engine(kCache);
    const Source source(kDoesNotFit, kMiB, 1);
    const auto window = std::make_shared<Window>(in(600));
    const auto older = save(engine, directory.file("older"), source, 0, window);
    const auto unplaced = read_unplaced(engine, source, 1);
    const auto another = read_unplaced(engine, source, 2);
    const auto newer = save(engine, directory.file("newer"), source, 3, open_window());
    check_durable(*newer);  // its memory was never taken by what is to be parked
    check_equal((*unplaced)->bytes_read(), 0U);
    window->open();
    check_durable(*older);
    check(!(*another)->wait_read(kEveryGroup, in(0.05)));
    check_equal((*another)->bytes_read(), 0U);
    unplaced->place({.paths = {directory.file("unplaced")}, .sync_directories = {}});
    check_durable(*unplaced);
    another->place({.paths = {directory.file("another")}, .sync_directories = {}});
    check_durable(*another);
    for (const auto* name : {"older", "unplaced", "another", "newer"}) {
        check(read_file(directory.file(name)) == reference_file(source.stream), name);
    }
}

void an_older_save_that_fails_lets_an_unplaced_one_be_read() {
    Engine engine(kCache);
    const Source source(kFits, kMiB, 1);
    const auto older = read_unplaced(engine, source, 0, std::make_shared<Window>(in(600)));
    const auto unplaced = read_unplaced(engine, source, 1);
    check(!(*unplaced)->wait_read(kEveryGroup, in(0.05)));
    older->cancel();
    check((*unplaced)->wait_read(kEveryGroup, in(60)));
}

void newer_saves_wait_for_memory_until_place() {
    const TemporaryDirectory directory;
    Engine engine(kCache);
    const Source source(kDoesNotFit, kMiB, 1);
    const Source small(4, 4, 2);
    const auto unplaced = read_unplaced(engine, source, 0);
    wait_until_full(engine);
    const auto newer = save(engine, directory.file("newer"), small, 1, open_window());
    check(!(*newer)->wait(in(0.1)), "all memory is held");
    unplaced->place({.paths = {directory.file("f")}, .sync_directories = {}});
    check_durable(*newer);
    check_durable(*unplaced);
    const auto parked = read_unplaced(engine, small, 2);
    check((*parked)->wait_read(kEveryGroup, in(60)));
    const auto newest = save(engine, directory.file("newest"), source, 3, open_window());
    check_durable(*newest);  // there is memory besides
    check(!(*parked)->done());
}

/// Placed or cancelled by others, or the engine shut down, while it is read.
void anything_at_any_moment() {
    const TemporaryDirectory directory;
    const auto ops = std::make_shared<HookedFileOps>();
    const Source source(kDoesNotFit, kMiB, 1);
    const Bytes expected = reference_file(source.stream);
    Random random(5);
    for (int round = 0; round < 60; ++round) {
        Engine engine(kCache, {}, ops);
        const auto name = directory.file(std::to_string(round));
        const auto job = read_unplaced(engine, source, 0);
        const auto later = [&](std::chrono::microseconds delay, auto act) {
            return std::jthread([delay, act] {
                std::this_thread::sleep_for(delay);
                act();
            });
        };
        const auto moment = [&] { return std::chrono::microseconds(random_below(random, 20'000)); };
        {
            const auto place = later(moment(), [&] {
                job->place({.paths = {name}, .sync_directories = {directory.path()}});
            });
            const auto end = later(moment(), [&, kind = round % 3] {
                if (kind == 0) job->cancel();
                if (kind == 1) engine.shutdown();
            });
            check((*job)->wait_read(kEveryGroup, in(60)));
            check((*job)->wait(in(60)));
        }
        const auto fault = (*job)->fault();
        check(!fault || (round % 3 != 2 && fault->kind != FaultKind::kIo));
        if (!fault) check(read_file(name) == expected);
        check_all_free(engine.cache());
        check_equal(ops->open_files(), 0U);
        std::filesystem::remove(name);
    }
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases(
        {{"reads_end_and_sources_change_before_the_files_have_paths",
          reads_end_and_sources_change_before_the_files_have_paths},
         {"files_are_opened_first_and_written_as_they_were_read",
          files_are_opened_first_and_written_as_they_were_read},
         {"a_save_larger_than_the_cache_goes_on_when_placed",
          a_save_larger_than_the_cache_goes_on_when_placed},
         {"a_save_without_files_is_done_when_placed", a_save_without_files_is_done_when_placed},
         {"a_save_may_be_placed_before_its_window_opens",
          a_save_may_be_placed_before_its_window_opens},
         {"a_wrong_placement_changes_nothing", a_wrong_placement_changes_nothing},
         {"a_failed_save_parks_nothing_and_is_never_placed",
          a_failed_save_parks_nothing_and_is_never_placed},
         {"a_dropped_handle_leaves_nothing_parked", a_dropped_handle_leaves_nothing_parked},
         {"faults_name_the_path_that_the_file_has", faults_name_the_path_that_the_file_has},
         {"what_is_parked_holds_no_older_save_up", what_is_parked_holds_no_older_save_up},
         {"an_older_save_that_fails_lets_an_unplaced_one_be_read",
          an_older_save_that_fails_lets_an_unplaced_one_be_read},
         {"newer_saves_wait_for_memory_until_place", newer_saves_wait_for_memory_until_place},
         {"anything_at_any_moment", anything_at_any_moment}});
}
