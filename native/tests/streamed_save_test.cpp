// Saves whose files the caller takes, piece by piece, and sends.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "pipeline/engine.h"
#include "support.h"

namespace datastates::testing {
namespace {

constexpr std::uint64_t kDoesNotFit = 40 * kMiB;

std::shared_ptr<SaveHandle> stream(Engine& engine, const std::vector<const Source*>& sources,
                                   std::uint64_t order = 0,
                                   std::shared_ptr<Window> window = open_window()) {
    std::vector<SaveFile> files;
    for (const Source* const source : sources) {
        files.emplace_back("s3://" + std::to_string(files.size()), source->stream.size(),
                           source->transfer);
    }
    return engine.save_streamed(files, order, window);
}

/// The next piece; null after the last.
std::shared_ptr<Piece> next(SaveJob& job, std::size_t file) {
    auto taken = job.take(file, in(60));
    check(taken.has_value(), "no piece comes");
    check(taken->ok(), taken->ok() ? "" : describe(taken->fault()));
    return **std::move(taken);
}

/// All of a file, each piece of which is kept until the next has come.
Bytes take_all(SaveJob& job, std::size_t file) {
    Bytes bytes;
    std::shared_ptr<Piece> last;
    while (auto piece = next(job, file)) {
        check(!last || last->bytes.size() == kSegmentBytes, "only the last piece is short");
        bytes.insert(bytes.end(), piece->bytes.begin(), piece->bytes.end());
        last = std::move(piece);
    }
    return bytes;
}

void wait_until_full(const Engine& engine) {
    wait_until("the cache is full", [&] { return engine.cache().stats().waiting > 0; });
}

void streams_are_the_files_that_a_save_writes() {
    const auto ops = std::make_shared<HookedFileOps>();
    Engine engine(kSmallCache, {}, ops);
    for (const std::uint64_t size :
         {std::uint64_t{0}, std::uint64_t{4}, kMiB - 4, kMiB, kMiB + 4, kSegmentBytes - 40,
          kSegmentBytes - 36, kSegmentBytes - 32, kSegmentBytes - 4, kSegmentBytes,
          kSegmentBytes + 4, 2 * kSegmentBytes - 8, 3 * kSegmentBytes + kMiB / 2}) {
        const Source source(size, kMiB, size);
        const auto job = stream(engine, {&source});
        const Bytes expected = reference_file(source.stream);
        check(take_all(*job->job(), 0) == expected, std::to_string(size));
        check_equal((*job)->bytes_written(), expected.size());
        check(!(*job)->done());
        (*job)->stored(0);
        check_durable(*job);
    }
    check(ops->trace().empty(), "no file was touched");
    check_all_free(engine.cache());
}

void one_thread_takes_files_larger_than_the_cache_in_turn() {
    Engine engine(kSmallCache);
    const Source a(kDoesNotFit, kMiB, 1);
    const Source b(kDoesNotFit + 4, kMiB, 2);
    const Source c(12, 4, 3);
    const auto job = stream(engine, {&a, &b, &c});
    std::size_t file = 0;
    for (const Source* source : {&a, &b, &c}) {
        check(take_all(*job->job(), file) == reference_file(source->stream), std::to_string(file));
        (*job)->stored(file++);
    }
    check_durable(*job);
    check_all_free(engine.cache());
}

void several_threads_take_files_at_once() {
    Engine engine(kSmallCache);
    std::vector<std::unique_ptr<Source>> sources;
    std::vector<const Source*> all;
    for (std::uint64_t i = 0; i < 6; ++i) {
        const std::uint64_t size = i % 2 == 0 ? 20 * kMiB + 4 * i : kMiB + 4 * i;
        all.push_back(sources.emplace_back(std::make_unique<Source>(size, kMiB, i)).get());
    }
    const auto job = stream(engine, all);
    std::atomic<std::size_t> left = 0;
    std::vector<int> right(all.size());
    {
        std::vector<std::jthread> threads;
        for (int i = 0; i < 3; ++i) {
            threads.emplace_back([&] {
                for (std::size_t file = left++; file < all.size(); file = left++) {
                    right[file] = take_all(*job->job(), file) == reference_file(all[file]->stream);
                    (*job)->stored(file);
                }
            });
        }
    }
    check_durable(*job);
    check(std::ranges::all_of(right, [](int is) { return is == 1; }));
    check_all_free(engine.cache());
}

void a_file_is_stored_once_and_when_it_was_taken() {
    const TemporaryDirectory directory;
    Engine engine(kSmallCache);
    const Source source(12, 4, 1);
    const auto job = stream(engine, {&source, &source});
    const auto words = [&](std::size_t file, const char* text) {
        check_throws<std::invalid_argument>(text, [&] { (*job)->stored(file); });
    };
    words(0, "not taken to its end");
    take_all(*job->job(), 0);
    (*job)->stored(0);
    words(0, "stored before");
    words(2, "not one of the save's 2");
    check(!(*job)->wait(in(0.05)), "a file is missing");
    take_all(*job->job(), 1);
    (*job)->stored(1);
    check_durable(*job);
    check_durable(*stream(engine, {}));
    const auto file =
        engine.save({SaveFile(directory.file("f"), 12, source.transfer)}, {}, 0, open_window());
    check_throws<std::invalid_argument>("itself", [&] { (*file)->take(0, in(0)); });
}

void a_failed_job_wakes_its_takers_and_leaves_what_was_taken() {
    Engine engine(kSmallCache);
    const Source source(kDoesNotFit, kMiB, 1);
    auto job = stream(engine, {&source, &source});
    const auto held = next(*job->job(), 0);
    wait_until_full(engine);
    check(!(*job)->take(1, in(0.05)), "nothing of the second file is read yet");
    std::optional<Result<std::shared_ptr<Piece>>> woken;
    {
        const std::jthread taker([&] { woken = (*job)->take(1, in(600)); });
        job->fail(not_transferred("the bucket is gone", 5, "s3://0"));
        check((*job)->wait(in(60)), "it does not wait for what was taken");
    }
    check(woken && !woken->ok() && woken->fault().kind == FaultKind::kTransfer);
    check(describe(*(*job)->fault()) == "transfer of 's3://0' failed: the bucket is gone",
          describe(*(*job)->fault()));
    (*job)->stored(0);  // nothing
    job.reset();
    const std::uint64_t total = engine.cache().stats().total_segments;
    wait_until("one is held", [&] { return engine.cache().stats().free_segments == total - 1; });
    check(std::ranges::equal(held->bytes, std::span(source.stream).first(kSegmentBytes)));
    const auto after = stream(engine, {&source});  // with one segment less
    check(take_all(*after->job(), 0) == reference_file(source.stream));
}

void a_piece_outlives_the_engine() {
    const Source source(kDoesNotFit, kMiB, 1);
    std::shared_ptr<Piece> held;
    {
        Engine engine(kSmallCache);
        const auto job = stream(engine, {&source});
        held = next(*job->job(), 0);
        engine.shutdown();
        check((*job)->fault()->kind == FaultKind::kShutdown);
    }
    check(std::ranges::equal(held->bytes, std::span(source.stream).first(kSegmentBytes)));
}

void a_dropped_handle_cancels_what_is_not_stored() {
    Engine engine(kSmallCache);
    const Source source(4, 4, 1);
    auto job = stream(engine, {&source});
    check((*job)->wait_read(kEveryGroup, in(60)));
    const auto kept = job->job();
    job.reset();
    check(kept->wait(in(60)));
    check(kept->fault()->kind == FaultKind::kCancelled);
    check_all_free(engine.cache());
}

void what_is_not_taken_holds_no_older_save_up() {
    const TemporaryDirectory directory;
    Engine engine(kSmallCache);
    const Source source(kDoesNotFit, kMiB, 1);
    const auto window = std::make_shared<Window>(in(600));
    const auto save = [&](const std::string& name, std::uint64_t order, auto opens) {
        return engine.save({SaveFile(directory.file(name), kDoesNotFit, source.transfer)}, {},
                           order, std::move(opens));
    };
    const auto older = save("older", 0, window);
    const auto streamed = stream(engine, {&source}, 1);
    const auto newer = save("newer", 2, open_window());
    check_durable(*newer);
    check_equal((*streamed)->bytes_read(), 0U);
    window->open();
    check_durable(*older);
    check(take_all(*streamed->job(), 0) == reference_file(source.stream));
}

void a_store_that_stands_still_holds_no_other_thread_up() {
    const TemporaryDirectory directory;
    Engine engine(kSmallCache, {.copy = 1, .flush = 1, .restore = 1});
    const Source small(kMiB, kMiB, 1);
    const Source source(kDoesNotFit, kMiB, 2);
    const auto still = stream(engine, {&small});
    check((*still)->wait_read(kEveryGroup, in(60)));
    const auto newer = engine.save({SaveFile(directory.file("f"), kDoesNotFit, source.transfer)},
                                   {}, 1, open_window());
    check_durable(*newer);
    check(!(*still)->done());
}

/// Failed by others, or the engine shut down, while it is taken.
void anything_at_any_moment() {
    const Source a(kDoesNotFit, kMiB, 1);
    const Source b(kSegmentBytes, kMiB, 2);
    Random random(5);
    for (int round = 0; round < 40; ++round) {
        Engine engine(kSmallCache);
        auto job = stream(engine, {&a, &b});
        const auto take = [&](std::size_t file, bool slow) {
            const auto of = job->job();
            return std::jthread([of, file, slow] {
                while (auto taken = of->take(file, in(60))) {
                    if (!taken->ok() || !**taken) break;
                    if (slow) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                }
            });
        };
        const auto delay = std::chrono::microseconds(random_below(random, 40'000));
        {
            const auto first = take(0, round % 2 == 0);
            const auto second = take(1, round % 4 < 2);
            std::this_thread::sleep_for(delay);
            if (round % 3 == 0) job->fail(not_transferred("at some time", 0, "s3://0"));
            if (round % 3 == 1) engine.shutdown();
            if (round % 3 == 2) job.reset();
        }
        check_all_free(engine.cache());
    }
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<
        streams_are_the_files_that_a_save_writes,
        one_thread_takes_files_larger_than_the_cache_in_turn, several_threads_take_files_at_once,
        a_file_is_stored_once_and_when_it_was_taken,
        a_failed_job_wakes_its_takers_and_leaves_what_was_taken, a_piece_outlives_the_engine,
        a_dropped_handle_cancels_what_is_not_stored, what_is_not_taken_holds_no_older_save_up,
        a_store_that_stands_still_holds_no_other_thread_up, anything_at_any_moment>();
}
