// Windows, cancelling, dropping handles, shutting down: when each is allowed, which is always.

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "pipeline/engine.h"
#include "support.h"

namespace datastates::testing {
namespace {

constexpr std::uint64_t kSize = 40 * kMiB;

std::shared_ptr<SaveHandle> save(Engine& engine, const TemporaryDirectory& directory,
                                 const std::string& name, const Source& source, std::uint64_t order,
                                 std::shared_ptr<Window> window) {
    return engine.save({SaveFile(directory.file(name), source.stream.size(), source.transfer)},
                       {directory.path()}, order, window);
}

void a_window_opens_by_hand_or_by_deadline() {
    const TemporaryDirectory directory;
    Engine engine(kSmallCache);
    const Source source(kSize, kMiB, 1);
    const auto window = std::make_shared<Window>(in(600));
    const auto by_hand = save(engine, directory, "a", source, 0, window);
    check(!(*by_hand)->wait_read(kEveryGroup, in(0.1)));
    check_equal((*by_hand)->bytes_read(), 0U);
    window->open();
    check((*by_hand)->wait(in(60)));
    const auto by_deadline =
        save(engine, directory, "b", source, 1, std::make_shared<Window>(in(0.2)));
    check(!(*by_deadline)->wait_read(kEveryGroup, in(0.05)));
    check_durable(*by_deadline);
}

void a_closed_window_holds_nobody_up() {
    const TemporaryDirectory directory;
    Engine engine(kSmallCache);
    const Source source(kSize, kMiB, 1);
    const auto window = std::make_shared<Window>(in(600));
    const auto older = save(engine, directory, "older", source, 0, window);
    const auto newer = save(engine, directory, "newer", source, 1, open_window());
    check((*newer)->wait(in(60)));
    check(!(*older)->done());
    window->open();
    check_durable(*older);
}

void a_job_progresses_while_slabs_are_held() {
    const TemporaryDirectory directory;
    Engine engine(kSmallCache);
    HostCache::SlabRequest request(engine.shared_cache(), kSegmentBytes, 0);
    check(request.wait_until(Clock::now()) == HostCache::SlabRequest::State::kGranted);
    const Lease slab = request.take();
    HostCache::SlabRequest waiting(engine.shared_cache(), kSegmentBytes, 0);
    const Source source(kSize, kMiB, 1);
    const auto job = save(engine, directory, "f", source, 5, open_window());
    check_durable(*job);
}

void cancelling_at_any_time_frees_all() {
    const TemporaryDirectory directory;
    Engine engine(kSmallCache);
    const Source source(kSize, kMiB, 1);
    Random random(2);
    for (int round = 0; round < 25; ++round) {
        const auto name = std::to_string(round);
        const auto window =
            random_below(random, 4) == 0 ? std::make_shared<Window>(in(600)) : open_window();
        const auto job = save(engine, directory, name, source, 0, window);
        std::this_thread::sleep_for(std::chrono::microseconds(random_below(random, 40'000)));
        job->cancel();
        check((*job)->wait_read(kEveryGroup, in(60)));
        check((*job)->wait(in(60)));
        const auto fault = (*job)->fault();
        check(!fault || fault->kind == FaultKind::kCancelled);
        if (!fault) check(read_file(directory.file(name)) == reference_file(source.stream));
        check_all_free(engine.cache());
    }
}

void a_dropped_handle_never_reads_again() {
    const TemporaryDirectory directory;
    Engine engine(kSmallCache);
    Random random(3);
    for (int round = 0; round < 25; ++round) {
        auto source = std::make_unique<Source>(kSize, kMiB, 1);
        const Bytes expected = reference_file(source->stream);
        const auto name = std::to_string(round);
        auto job = save(engine, directory, name, *source, 0, open_window());
        std::this_thread::sleep_for(std::chrono::microseconds(random_below(random, 40'000)));
        const bool was_read = (*job)->all_read();
        job.reset();
        source.reset();  // AddressSanitizer sees a read after this
        check_all_free(engine.cache());
        if (!was_read) continue;
        // All was read: the save goes on without its handle. Nothing tells when it is done.
        wait_until("the file is never whole", [&] {
            return std::filesystem::file_size(directory.file(name)) == expected.size();
        });
        check(read_file(directory.file(name)) == expected);
    }
}

void a_dropped_restore_never_writes_again() {
    const TemporaryDirectory directory;
    Engine engine(kSmallCache);
    const Source source(kSize, kMiB, 1);
    const auto saved = save(engine, directory, "f", source, 0, open_window());
    check((*saved)->wait(in(60)));
    Random random(4);
    for (int round = 0; round < 25; ++round) {
        auto out = std::make_unique<Bytes>(kSize);
        auto job = engine.restore({whole_file(directory.file("f"), *out)});
        std::this_thread::sleep_for(std::chrono::microseconds(random_below(random, 20'000)));
        job.reset();
        out.reset();
        check_all_free(engine.cache());
    }
}

void shutdown_at_any_time_ends_all_jobs() {
    const TemporaryDirectory directory;
    const Source source(kSize, kMiB, 1);
    Random random(5);
    for (int round = 0; round < 15; ++round) {
        Engine engine(kSmallCache);
        std::vector<std::shared_ptr<SaveHandle>> jobs;
        for (int j = 0; j < 4; ++j) {
            jobs.push_back(save(engine, directory, std::to_string(round) + "-" + std::to_string(j),
                                source, static_cast<std::uint64_t>(j),
                                j == 1 ? std::make_shared<Window>(in(600)) : open_window()));
        }
        Bytes out(kSize);
        const auto restore = engine.restore({whole_file(directory.file("0-0"), out)});
        std::this_thread::sleep_for(std::chrono::microseconds(random_below(random, 5'000)));
        engine.shutdown();
        engine.shutdown();
        for (const auto& job : jobs) {
            check((*job)->wait(Clock::now()));
            const auto fault = (*job)->fault();
            check(!fault || fault->kind == FaultKind::kShutdown);
        }
        check((*restore)->wait(Clock::now()));
        check_equal(engine.cache().stats().free_segments, kMinSegments);
        check(!engine.alive());
        check_throws<std::runtime_error>("shut down", [&] {
            static_cast<void>(save(engine, directory, "late", source, 0, open_window()));
        });
        jobs[1]->cancel();
    }
}

void restores_that_a_shutdown_cuts_off_do_not_succeed() {
    const OneCore one_core;
    const TemporaryDirectory directory;
    const Source source(kSize, kMiB, 1);
    std::atomic<Engine*> watched = nullptr;
    const auto ops = std::make_shared<HookedFileOps>([&](const HookedFileOps::Event& event) {
        // The engine stops when one restore is about to queue what it has to read, and the other to
        // get the segment that the first has. Its threads learn of it before the jobs do.
        while (event.call == HookedFileOps::Call::kRead && watched != nullptr) {
            try {
                static_cast<void>(watched.load()->restore({}));
                std::this_thread::sleep_for(std::chrono::microseconds(20));
            } catch (const std::runtime_error&) {
                watched.exchange(nullptr)->cache().interrupt();
                for (int i = 0; i < 10; ++i) std::this_thread::yield();
            }
        }
        HookedFileOps::Instead instead;  // read from memory: the thread does not wait for a disk
        if (event.call == HookedFileOps::Call::kSetDirect) instead.result = {.error = EINVAL};
        return instead;
    });
    Engine engine(kSmallCache, {}, ops);
    const std::uint64_t segments = engine.cache().stats().total_segments;
    check_equal(restore_share(segments), 1U);
    std::vector<Lease> taken;  // so that there is none to borrow
    while (taken.size() + 1 < segments) {
        taken.push_back(engine.cache().acquire(Share::kSave, 0, engine.cache().epoch()));
    }
    std::vector<std::shared_ptr<RestoreHandle>> older;  // it takes a while to fail them all
    for (int i = 0; i < 5'000; ++i) older.push_back(engine.restore({}));
    watched = &engine;
    std::vector<Bytes> out(2, Bytes(kSize));
    std::vector<std::shared_ptr<RestoreHandle>> restores;
    for (std::size_t i = 0; i < out.size(); ++i) {
        const auto path = directory.file(std::to_string(i));
        write_file(path, reference_file(source.stream));
        restores.push_back(engine.restore({whole_file(path, out[i])}));
    }
    std::jthread([&] {
        starve(gettid());
        engine.shutdown();
    }).join();
    for (const auto& restore : restores) {
        check((*restore)->wait(in(60)));
        const auto fault = (*restore)->fault();
        check(fault && fault->kind == FaultKind::kShutdown, "it was not all read");
    }
}

void handles_may_outlive_the_engine() {
    const TemporaryDirectory directory;
    const Source source(kSize, kMiB, 1);
    auto engine = std::make_unique<Engine>(kSmallCache);
    const auto window = std::make_shared<Window>(in(600));
    const auto job = save(*engine, directory, "f", source, 0, window);
    HostCache::SlabRequest request(engine->shared_cache(), kSegmentBytes, 0);
    Lease slab = request.take();
    engine.reset();
    window->open();
    check((*job)->wait(Clock::now()));
    slab.data()[0] = std::byte{1};
}

void jobs_without_bytes_or_files_succeed() {
    const TemporaryDirectory directory;
    Engine engine(kSmallCache);
    const auto empty = engine.save({}, {directory.path()}, 0, std::make_shared<Window>(in(600)));
    check((*empty)->wait_read(kEveryGroup, Clock::now()));
    check_durable(*empty);
    const auto nothing = engine.restore({});
    check_restored(*nothing);
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<a_window_opens_by_hand_or_by_deadline, a_closed_window_holds_nobody_up,
                     a_job_progresses_while_slabs_are_held, cancelling_at_any_time_frees_all,
                     a_dropped_handle_never_reads_again, a_dropped_restore_never_writes_again,
                     shutdown_at_any_time_ends_all_jobs,
                     restores_that_a_shutdown_cuts_off_do_not_succeed,
                     handles_may_outlive_the_engine, jobs_without_bytes_or_files_succeed>();
}
