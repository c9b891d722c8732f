// Everything at once, at random. Meant for the sanitizers.
//
// DATASTATES_TEST_SEED repeats the choices of a run that failed, though not the order of its
// threads; DATASTATES_TEST_SECONDS makes each case run for longer.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "chaos.h"
#include "check.h"
#include "pipeline/engine.h"
#include "support.h"

namespace datastates::testing {
namespace {

constexpr std::uint64_t kCallers = 4;

double seconds() {
    const char* const given = std::getenv("DATASTATES_TEST_SECONDS");
    return given != nullptr ? std::stod(given) : 4;
}

std::uint64_t run_seed() {
    static const std::uint64_t seed = [] {
        const char* const given = std::getenv("DATASTATES_TEST_SEED");
        const std::uint64_t chosen = given != nullptr ? std::stoull(given) : std::random_device{}();
        std::printf("      DATASTATES_TEST_SEED=%llu\n", static_cast<unsigned long long>(chosen));
        std::fflush(stdout);
        return chosen;
    }();
    return seed;
}

/// Streams that end before, at and after the ends of blocks and segments; and whose checksum table
/// fits into the last segment, fills it, or goes on behind it.
const std::vector<std::unique_ptr<Sample>>& samples() {
    static const auto all = [] {
        std::vector<std::unique_ptr<Sample>> made;
        for (const std::uint64_t size :
             {std::uint64_t{0}, std::uint64_t{4}, kMiB, 3 * kMiB + 4, kSegmentBytes - 36,
              kSegmentBytes - 4, kSegmentBytes, 2 * kSegmentBytes + 4096}) {
            made.push_back(std::make_unique<Sample>(size, size));
        }
        return made;
    }();
    return all;
}

std::ptrdiff_t open_descriptors() {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

/// Callers, and one who meddles, until `end` returns; then all that they began comes to its end.
void play(Scene& scene, std::uint64_t callers, std::uint64_t seed,
          const std::function<void()>& end) {
    std::mutex mutex;  // guards failure
    std::string failure;
    const auto guarded = [&](const std::function<void()>& part) {
        try {
            part();
        } catch (const std::exception& error) {
            const std::scoped_lock lock(mutex);
            failure = error.what();
            scene.over = true;
        }
    };
    std::atomic<bool> calling = true;
    std::jthread meddler([&, random = Random(seed)]() mutable {
        while (calling) {
            scene.meddle(random);
            std::this_thread::sleep_for(std::chrono::microseconds(random_below(random, 1000)));
        }
    });
    {
        std::vector<std::jthread> threads;
        for (std::uint64_t i = 0; i < callers; ++i) {
            threads.emplace_back([&, i] { guarded([&] { Caller(scene, seed * 10 + i).run(); }); });
        }
        guarded(end);
        scene.over = true;
    }
    calling = false;
    meddler.join();
    check(failure.empty(), failure);
}

/// Nothing is left of an engine at rest.
void check_at_rest(const Engine& engine, const HookedFileOps& ops) {
    check_all_free(engine.cache());
    check_equal(engine.cache().stats().waiting, 0U);
    check_equal(ops.open_files(), 0U);
}

void stress(Storage storage) {
    const auto seed = run_seed();
    const Watchdog watchdog("DATASTATES_TEST_SEED=" + std::to_string(seed),
                            std::chrono::seconds(240));
    static_cast<void>(samples());
    const auto before = open_descriptors();
    Tally tally;
    {
        const TemporaryDirectory directory;
        const auto ops = storage_at_random(storage, seed, tally);
        Engine engine(kMinSegments * kSegmentBytes, {}, ops);
        Scene scene(engine, samples(), directory.path(), storage, tally);
        play(scene, kCallers, seed, [&] {
            const auto end = in(seconds());
            while (!scene.over && Clock::now() < end) {
                std::this_thread::sleep_for(std::chrono::milliseconds(10));
            }
            engine.cache().grow((kMinSegments + 1) * kSegmentBytes);
        });
        // Of saves whose handles were dropped, it is not known when they end.
        wait_until("files stay open", [&] { return ops->open_files() == 0; });
        check_at_rest(engine, *ops);
        engine.shutdown();
        check_at_rest(engine, *ops);
    }
    tally.print();
    check_equal(open_descriptors(), before);
    check(tally.durable > 0 && tally.cancelled > 0 && tally.dropped > 0, "much has happened");
    check((tally.injected > 0) == (storage == Storage::kFailing));
}

void callers_at_random() {
    stress(Storage::kUnsteady);
}

void callers_at_random_on_storage_that_fails() {
    stress(Storage::kFailing);
}

/// An engine, as small as can be, that is shut down while all of it is going on.
void one_engine(std::uint64_t seed, Tally& tally) {
    const Watchdog watchdog("shutdown with seed " + std::to_string(seed),
                            std::chrono::seconds(120));
    Random random(seed);
    const auto storage = random_below(random, 2) == 0 ? Storage::kFailing : Storage::kUnsteady;
    const ThreadCounts threads{.copy = 1 + random_below(random, 3),
                               .flush = 1 + random_below(random, 4),
                               .restore = 1 + random_below(random, 3)};
    // From before the first job is queued to long after the cache is full.
    const std::chrono::microseconds delay(random_below(random, 1U << random_below(random, 18)));
    const TemporaryDirectory directory;
    auto ops = storage_at_random(storage, seed, tally);
    auto engine = std::make_unique<Engine>(kMinSegments * kSegmentBytes, threads, ops);
    Scene scene(*engine, samples(), directory.path(), storage, tally);
    play(scene, 1 + random_below(random, kCallers), seed, [&] {
        std::this_thread::sleep_for(delay);
        scene.stopping = true;
        const std::jthread another([&] { engine->shutdown(); });
        engine->shutdown();
        check(!engine->alive());
    });
    check_at_rest(*engine, *ops);
    const std::weak_ptr<HostCache> cache = engine->shared_cache();
    const std::weak_ptr<HookedFileOps> weak_ops = ops;
    engine.reset();
    ops.reset();
    check(cache.expired() && weak_ops.expired(), "the engine's memory is still held");
}

void shutdown_at_any_moment() {
    const auto seed = run_seed();
    static_cast<void>(samples());
    const auto before = open_descriptors();
    Tally tally;
    std::uint64_t engines = 0;
    const auto end = in(1.5 * seconds());
    while (Clock::now() < end) one_engine(seed + engines++, tally);
    std::printf("      %llu engines\n", static_cast<unsigned long long>(engines));
    tally.print();
    check_equal(open_descriptors(), before);
    check(tally.shut_down > 0 && tally.cancelled > 0, "much has happened");
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<callers_at_random, callers_at_random_on_storage_that_fails,
                     shutdown_at_any_moment>();
}
