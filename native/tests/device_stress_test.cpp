// Saves and restores of device memory, at random, with faults and cancels. Meant for the
// sanitizers.
//
// DATASTATES_TEST_SEED repeats the choices of a run that failed, though not the order of its
// threads; DATASTATES_TEST_SECONDS makes it run for longer.

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "device_stream.h"

namespace datastates::testing {
namespace {

constexpr int kDevices = 2;
constexpr std::uint64_t kCallers = 4;

double seconds() {
    const char* const given = std::getenv("DATASTATES_TEST_SECONDS");
    return given != nullptr ? std::stod(given) : 4;
}

std::uint64_t run_seed() {
    const char* const given = std::getenv("DATASTATES_TEST_SEED");
    const std::uint64_t seed = given != nullptr ? std::stoull(given) : std::random_device{}();
    std::printf("      DATASTATES_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
    std::fflush(stdout);
    return seed;
}

struct Tally {
    std::uint64_t longest_wait_us = 0;  // of a call of training
    std::atomic<std::uint64_t> begun = 0;
    std::atomic<std::uint64_t> saved = 0;
    std::atomic<std::uint64_t> restored = 0;
    std::atomic<std::uint64_t> cancelled = 0;
    std::atomic<std::uint64_t> failed = 0;
    std::atomic<std::uint64_t> shut_down = 0;

    [[nodiscard]] bool is_full() const {
        return saved > 0 && restored > 0 && cancelled > 0 && failed > 0;
    }
};

/// Sizes of streams: below, at and above a segment's; together, the cache does not hold them.
constexpr std::array<std::uint64_t, 4> kSizes{kMiB + 4, 2 * kMiB, kSegmentBytes,
                                              2 * kSegmentBytes + 12};

/// A training process of its own: it saves, goes on training, and restores, one after the other.
class Caller {
  public:
    Caller(Engine& engine, std::string directory, Tally& tally, std::uint64_t seed)
        : engine_(engine),
          directory_(std::move(directory)),
          tally_(tally),
          random_(seed),
          order_(seed % kCallers),
          layout_(kSizes.at(random_below(random_, kSizes.size())), kDevices, kMiB, seed),
          images_{random_image(layout_, seed), random_image(layout_, seed + 1)} {}

    void run(const std::atomic<bool>& over) {
        while (!over) {
            if (random_below(random_, 3) == 0 && !durable_.empty()) {
                restore();
            } else {
                save();
            }
        }
    }

  private:
    /// Events after all kernels; none if a fault was injected there.
    bool fences(Fences& fences) {
        try {
            fences = training_.fences(engine_);
            return true;
        } catch (const std::exception&) {
            return false;
        }
    }

    /// True if the job succeeded.
    bool ended(const std::optional<Fault>& fault) {
        if (!fault) return true;
        if (fault->kind == FaultKind::kCancelled) ++tally_.cancelled;
        if (fault->kind == FaultKind::kDevice) ++tally_.failed;
        if (fault->kind == FaultKind::kShutdown) ++tally_.shut_down;
        check(fault->kind != FaultKind::kIo && fault->kind != FaultKind::kCorrupt,
              describe(*fault));
        return false;
    }

    void save() {
        const Image& before = images_.at(random_below(random_, 2));
        const std::string path =
            directory_ + "/" + std::to_string(order_) + "-" + std::to_string(files_++);
        tensors_.write_host(before);
        training_.write(tensors_, before);
        Fences after_kernels;
        if (!fences(after_kernels)) return;
        const std::vector<SaveFile> files{tensors_.save_file(path)};
        std::shared_ptr<SaveHandle> save;
        try {
            save = engine_.save(files, {}, next_order()++, open_window(), after_kernels);
        } catch (const std::runtime_error&) {
            return;  // shut down
        }
        ++tally_.begun;
        if (random_below(random_, 6) == 0) save->cancel();
        for (Group group = 0; group < kGroups; ++group) {
            check((*save)->wait_queued(group, in(120)), "the copies are enqueued");
            if ((*save)->fault()) continue;
            try {
                training_.hold(*save, group);
            } catch (const std::exception&) {  // a fault was injected
                check((*save)->wait_read(group, in(120)));
            }
        }
        // While the devices still copy, at times:
        training_.write(tensors_, images_.at(random_below(random_, 2)));
        if (random_below(random_, 6) == 0) save->cancel();
        if (random_below(random_, 8) == 0) return;  // dropped
        check((*save)->wait(in(120)), "the save ends");
        if (!ended((*save)->fault())) return;
        ++tally_.saved;
        const Bytes stream = stream_of(layout_, before);
        check(read_file(path) == reference_file(stream), "the bytes are those at the fence");
        durable_[path] = &before;
    }

    void restore() {
        const auto& [path, image] = *durable_.begin();
        training_.write(tensors_, images_.at(random_below(random_, 2)));
        Fences after_kernels;
        if (!fences(after_kernels)) return;
        std::shared_ptr<RestoreHandle> restore;
        try {
            restore = engine_.restore({tensors_.restore_file(path)}, after_kernels);
        } catch (const std::runtime_error&) {
            return;
        }
        if (random_below(random_, 5) == 0) restore->cancel();
        if (random_below(random_, 8) == 0) return;
        check((*restore)->wait(in(120)), "the restore ends");
        if (!ended((*restore)->fault())) return;
        ++tally_.restored;
        check(stream_of(layout_, tensors_.image()) == stream_of(layout_, *image),
              "what was saved is restored");
        std::filesystem::remove(path);
        durable_.erase(path);
    }

    static std::atomic<std::uint64_t>& next_order() {
        static std::atomic<std::uint64_t> order = 0;
        return order;
    }

    Engine& engine_;
    const std::string directory_;
    Tally& tally_;
    Random random_;
    const std::uint64_t order_;
    const Layout layout_;
    const std::array<Image, 2> images_;
    const Tensors tensors_{layout_};
    const Training training_{kDevices};
    std::map<std::string, const Image*> durable_;
    int files_ = 0;
};

/// Makes the driver fail now and then; never twice in a row, which would be an error that stays.
void meddle(Random& random, const std::atomic<bool>& over) {
    constexpr std::array kSymbols{"cuEventCreate", "cuEventRecord", "cuStreamWaitEvent",
                                  "cuMemcpyDtoHAsync_v2", "cuEventQuery"};
    std::map<std::string, std::uint64_t> due;  // the call that fails
    while (!over) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20 + random_below(random, 300)));
        const std::string symbol = kSymbols.at(random_below(random, kSymbols.size()));
        const std::uint64_t calls = fake_cuda_count(symbol.c_str());
        if (due.contains(symbol) && calls < due[symbol] + 2) continue;
        check_equal(fake_cuda_fail_next(symbol.c_str(), 2, 0), 0);
        due[symbol] = calls + 1;
    }
}

/// Callers until `end` returns; then all that they began comes to its end.
void play(Engine& engine, const std::string& directory, std::uint64_t seed, Tally& tally,
          const std::function<void()>& end) {
    std::mutex mutex;  // guards failure
    std::string failure;
    std::atomic<bool> over = false;
    {
        std::vector<std::jthread> threads;
        for (std::uint64_t i = 0; i < kCallers; ++i) {
            threads.emplace_back([&, i] {
                try {
                    Caller(engine, directory, tally, seed * kCallers + i).run(over);
                } catch (const std::exception& error) {
                    const std::scoped_lock lock(mutex);
                    failure = error.what();
                    over = true;
                }
            });
        }
        threads.emplace_back([&] {
            Random random(seed);
            meddle(random, over);
        });
        end();
        over = true;
    }
    check(failure.empty(), failure);
}

/// Callers on an engine of their own, for `duration` seconds after the first save has begun: on a
/// slow machine that takes a while.
void one_engine(std::uint64_t seed, double duration, bool shut_down, Tally& tally) {
    const FakeDriver driver(seed, 100);
    fake_cuda_configure(0, 0, 0, kMiB / 4);
    {
        const TemporaryDirectory directory;
        Engine engine(kMinSegments * kSegmentBytes, {}, posix_file_ops(), driver.api);
        for (int device = 0; device < kDevices; ++device) {
            check_ok(engine.devices().open(device));
        }
        play(engine, directory.path(), seed, tally, [&, before = tally.begun.load()] {
            const auto patience = in(60);
            while (tally.begun == before && Clock::now() < patience) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
            const auto end = in(duration);
            const auto last = in(duration + (shut_down ? 0 : 60));  // sanitizers are slow
            while (Clock::now() < end || (!tally.is_full() && Clock::now() < last)) {
                std::this_thread::sleep_for(std::chrono::milliseconds(5));
            }
            if (shut_down) {
                engine.shutdown();
            } else {
                engine.grow((kMinSegments + 2) * kSegmentBytes);
            }
        });
        check_all_free(engine.cache());
        check_equal(fake_cuda_synchronize_all(60), 0);
        tally.longest_wait_us = fake_cuda_count("training_wait_us");
    }
    check_nothing_left();
}

void callers_at_random() {
    const auto seed = run_seed();
    Tally tally;
    one_engine(seed, seconds(), false, tally);
    std::printf("      saved %llu, restored %llu, cancelled %llu, failed %llu\n",
                static_cast<unsigned long long>(tally.saved),
                static_cast<unsigned long long>(tally.restored),
                static_cast<unsigned long long>(tally.cancelled),
                static_cast<unsigned long long>(tally.failed));
    std::printf("      a call of training waited at most %llu us behind one of the engine's\n",
                static_cast<unsigned long long>(tally.longest_wait_us));
    check(tally.is_full(), "much has happened");
}

void shutdown_at_any_moment() {
    const auto seed = run_seed();
    Tally tally;
    Random random(seed);
    const auto end = in(seconds());
    const auto last = in(seconds() + 60);
    for (std::uint64_t n = 0; Clock::now() < end || (tally.shut_down == 0 && Clock::now() < last);
         ++n) {
        one_engine(seed + n, static_cast<double>(random_below(random, 200)) / 1000, true, tally);
    }
    check(tally.shut_down > 0, "much has happened");
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<callers_at_random, shutdown_at_any_moment>();
}
