// Everything at once, at random. Meant for the sanitizers.

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine.h"
#include "support.h"

namespace datastates::testing {
namespace {

constexpr double kSeconds = 8;

/// One of several callers: saves, waits, cancels, restores and compares, until the time is up.
class Caller {
  public:
    Caller(Engine& engine, const TemporaryDirectory& directory, std::atomic<std::uint64_t>& order,
           std::uint64_t seed)
        : engine_(engine), directory_(directory), order_(order), seed_(seed), random_(seed) {}

    void run() {
        const auto end = in(kSeconds);
        for (int round = 0; Clock::now() < end; ++round) one_round(round);
    }

  private:
    void one_round(int round) {
        const std::uint64_t order = order_++;
        const std::uint64_t size = round_up(random_below(random_, 24 * kMiB), 4);
        const Source source(size, 1 + random_below(random_, 2 * kMiB), random_());
        const std::string path =
            directory_.file(std::to_string(seed_) + "-" + std::to_string(round));
        HostCache::SlabRequest request(engine_.shared_cache(), kSegmentBytes, order);
        request.wait_until(in(0.001 * static_cast<double>(random_below(random_, 20))));
        Lease slab = request.take();
        const auto window =
            std::make_shared<Window>(in(0.001 * static_cast<double>(random_below(random_, 30))));
        auto job = engine_.save({SaveFile(path, size, source.transfer)}, {directory_.path()}, order,
                                window);
        const std::uint64_t fate = random_below(random_, 6);
        if (fate == 0) job->cancel();
        if (fate == 1) {
            job.reset();
            return;
        }
        if (fate == 2) window->open();
        check((*job)->wait_read(static_cast<Group>(random_below(random_, 3)), in(60)));
        check((*job)->wait_read(kEveryGroup, in(60)));
        slab.release();
        if (fate == 3) return;
        check((*job)->wait(in(60)));
        if ((*job)->fault()) return;
        check(read_file(path) == reference_file(source.stream));
        restore(path, source);
        std::filesystem::remove(path);
    }

    void restore(const std::string& path, const Source& source) {
        Bytes out(source.stream.size(), std::byte{0});
        Transfer transfer;
        for (const Range& region : source.regions) {
            transfer.add(region.begin, region.size(), out.data() + region.begin, 0);
        }
        auto job =
            engine_.restore({RestoreFile(path, file_bytes(out.size()), out.size(), transfer)});
        if (random_below(random_, 5) == 0) {
            job.reset();
            return;
        }
        check((*job)->wait(in(60)));
        if (!(*job)->fault()) check(out == source.stream);
    }

    Engine& engine_;
    const TemporaryDirectory& directory_;
    std::atomic<std::uint64_t>& order_;
    const std::uint64_t seed_;
    Random random_;
};

void stress(bool with_faults) {
    const TemporaryDirectory directory;
    std::atomic<std::uint64_t> calls = 0;
    auto ops = std::make_shared<HookedFileOps>([&](const HookedFileOps::Event&) {
        HookedFileOps::Instead instead;
        if (with_faults && ++calls % 97 == 0) instead.result = SysResult{.value = -1, .error = EIO};
        return instead;
    });
    Engine engine(6 * kSegmentBytes, {}, ops);
    std::atomic<std::uint64_t> order = 0;
    std::atomic<bool> failed = false;
    {
        std::vector<std::jthread> callers;
        for (std::uint64_t seed = 1; seed <= 4; ++seed) {
            callers.emplace_back([&, seed] {
                try {
                    Caller(engine, directory, order, seed).run();
                } catch (const std::exception& error) {
                    std::printf("%s\n", error.what());
                    failed = true;
                }
            });
        }
    }
    check(!failed);
    check_all_free(engine.cache());
    engine.shutdown();
    check_equal(ops->open_files(), 0U);
}

void callers_at_random() {
    stress(false);
}
void callers_at_random_with_faults() {
    stress(true);
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases({{"callers_at_random", callers_at_random},
                      {"callers_at_random_with_faults", callers_at_random_with_faults}});
}
