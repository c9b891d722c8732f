#include "chaos.h"

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <utility>

#include "check.h"

namespace datastates::testing {
namespace {

using Call = HookedFileOps::Call;
using Event = HookedFileOps::Event;
using Instead = HookedFileOps::Instead;

constexpr std::size_t kRemembered = 16;
constexpr std::size_t kMaxInFlight = 6;
constexpr double kPatience = 60;

/// A number that threads draw without a lock (splitmix64).
std::uint64_t drawn(std::uint64_t seed, std::uint64_t n) {
    std::uint64_t z = seed + n * 0x9E3779B97F4A7C15U;
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31U);
}

Instead disturbed(const Event& event, Storage storage, Random& random, Tally& tally) {
    const auto one_in = [&](std::uint64_t count) { return random_below(random, count) == 0; };
    if (one_in(40)) {
        std::this_thread::sleep_for(std::chrono::microseconds(random_below(random, 3000)));
    }
    if (storage == Storage::kFailing && one_in(100)) {
        constexpr std::array<int, 4> kErrors{EIO, ENOSPC, EDQUOT, ENOMEM};
        ++tally.injected;
        return HookedFileOps::failing(kErrors.at(random_below(random, kErrors.size())));
    }
    const bool moves = event.call == Call::kWrite || event.call == Call::kRead;
    if (event.call == Call::kReadCached && !one_in(8)) {
        return {.result = {}, .cut = one_in(4) ? 1 + random_below(random, event.size) : event.size};
    }
    if (event.call == Call::kSetDirect && event.size == 1 && one_in(8))
        return HookedFileOps::failing(EINVAL);
    if ((moves || event.call == Call::kOpen) && one_in(16)) return HookedFileOps::failing(EINTR);
    if (moves && one_in(16)) {
        return {.result = {}, .cut = 1 + random_below(random, event.size)};
    }
    return {};
}

}  // namespace

Watchdog::Watchdog(std::string what, std::chrono::seconds limit)
    : thread_([this, limit, what = std::move(what)](const std::stop_token& stop) {
          std::unique_lock lock(mutex_);
          barked_.wait_for(lock, stop, limit, [] { return false; });
          if (stop.stop_requested()) return;
          std::printf("%s: still not over after %lld s\n", what.c_str(),
                      static_cast<long long>(limit.count()));
          std::fflush(stdout);
          std::abort();
      }) {}

void Tally::print() const {
    std::printf(
        "      %llu saves: %llu durable, %llu failed, %llu cancelled, %llu shut "
        "down, %llu "
        "dropped; "
        "%llu restored, %llu slabs, %llu errors injected\n",
        static_cast<unsigned long long>(submitted), static_cast<unsigned long long>(durable),
        static_cast<unsigned long long>(failed), static_cast<unsigned long long>(cancelled),
        static_cast<unsigned long long>(shut_down), static_cast<unsigned long long>(dropped),
        static_cast<unsigned long long>(restored), static_cast<unsigned long long>(slabs),
        static_cast<unsigned long long>(injected));
}

std::shared_ptr<HookedFileOps> storage_at_random(Storage storage, std::uint64_t seed,
                                                 Tally& tally) {
    auto calls = std::make_shared<std::atomic<std::uint64_t>>(0);
    return std::make_shared<HookedFileOps>([storage, seed, calls, &tally](const Event& event) {
        Random random(drawn(seed, ++*calls));
        return disturbed(event, storage, random, tally);
    });
}

Scene::Scene(Engine& engine_used, const std::vector<std::unique_ptr<Sample>>& samples_saved,
             std::string directory_used, Storage storage_used, Tally& tally_kept)
    : engine(engine_used),
      samples(samples_saved),
      directory(std::move(directory_used)),
      storage(storage_used),
      tally(tally_kept) {}

void Scene::add(const std::shared_ptr<Window>& window, const std::shared_ptr<SaveHandle>& job) {
    const std::scoped_lock lock(mutex_);
    windows_.push_back(window);
    jobs_.push_back(job);
    if (jobs_.size() > kRemembered) jobs_.pop_front();
}

void Scene::meddle(Random& random) {
    std::shared_ptr<Window> window;
    std::shared_ptr<SaveHandle> job;
    {
        const std::scoped_lock lock(mutex_);
        std::erase_if(windows_, [](const auto& weak) {
            const auto w = weak.lock();
            return !w || w->is_open();
        });
        if (!windows_.empty()) window = windows_[random_below(random, windows_.size())].lock();
        if (!jobs_.empty() && random_below(random, 64) == 0) {
            job = jobs_.at(random_below(random, jobs_.size())).lock();
        }
    }
    if (job) {
        job->cancel();
    } else if (window) {
        window->open();
    }
}

void Caller::run() {
    try {
        while (!scene_.over) {
            one_save();
            while (in_flight_.size() > kMaxInFlight) {
                Saved oldest = std::move(in_flight_.front());
                in_flight_.pop_front();
                settle(std::move(oldest));
            }
        }
    } catch (const std::runtime_error& error) {
        if (!scene_.stopping || std::string(error.what()) != "the engine is shut down") throw;
    }
    while (!in_flight_.empty()) {
        Saved oldest = std::move(in_flight_.front());
        in_flight_.pop_front();
        settle(std::move(oldest));
    }
}

std::shared_ptr<Window> Caller::random_window() {
    // Some wait to be opened.
    const std::uint64_t milliseconds = one_in(4) ? 600'000 : random_below(random_, 20);
    return std::make_shared<Window>(in(0.001 * static_cast<double>(milliseconds)));
}

Lease Caller::random_slab(std::uint64_t order) {
    if (!one_in(3)) return {};
    HostCache::SlabRequest request(scene_.engine.shared_cache(), kSegmentBytes, order);
    const auto state =
        request.wait_until(in(0.001 * static_cast<double>(random_below(random_, 10))));
    if (state != HostCache::SlabRequest::State::kGranted) return {};
    ++scene_.tally.slabs;
    return request.take();
}

void Caller::one_save() {
    if (one_in(6)) {
        save_what_is_gone_soon();
        return;
    }
    const std::uint64_t order = scene_.order++;
    Saved saved{.job = nullptr, .window = random_window(), .files = {}, .slab = random_slab(order)};
    for (std::uint64_t n = random_below(random_, 4); n > 0; --n) {
        const Sample& sample = *scene_.samples[random_below(random_, scene_.samples.size())];
        const std::string path = scene_.directory + "/" + name_ + "-" + std::to_string(files_++);
        saved.files.push_back({.path = path, .sample = &sample});
    }
    submit(saved, order);
    switch (random_below(random_, 6)) {
        case 0:
            saved.job->cancel();
            break;
        case 1:
            saved.job.reset();     // or a thread that is meddling with it will
            saved.window->open();  // one that had nothing to read goes on
            ++scene_.tally.dropped;
            return;
        case 2:
            saved.window->open();
            check((*saved.job)
                      ->wait_read(static_cast<Group>(random_below(random_, 3)), in(kPatience)),
                  "a group is read, or the job has failed");
            break;
        case 3:
            saved.window->open();
            break;
        default:
            break;
    }
    in_flight_.push_back(std::move(saved));
}

void Caller::submit(Saved& saved, std::uint64_t order) {
    std::vector<SaveFile> files;
    for (const auto& [path, sample] : saved.files) {
        files.emplace_back(path, sample->source.stream.size(), sample->source.transfer);
    }
    saved.job = scene_.engine.save(files, {scene_.directory}, order, saved.window);
    ++scene_.tally.submitted;
    scene_.add(saved.window, saved.job);
}

/// The handle and what it reads go while the save is under way: AddressSanitizer sees a late read.
void Caller::save_what_is_gone_soon() {
    const std::uint64_t size = round_up(random_below(random_, 3 * kMiB), 4);
    auto source = std::make_unique<Source>(size, kMiB, random_());
    const std::string path = scene_.directory + "/" + name_ + "-" + std::to_string(files_++);
    const auto window = random_window();
    const std::vector<SaveFile> files{SaveFile(path, size, source->transfer)};
    auto job = scene_.engine.save(files, {}, scene_.order++, window);
    ++scene_.tally.submitted;
    std::this_thread::sleep_for(std::chrono::microseconds(random_below(random_, 5000)));
    if (one_in(2)) {
        window->open();
        check((*job)->wait_read(kEveryGroup, in(kPatience)), "all is read, or the job has failed");
    }
    job.reset();
    source.reset();
    window->open();  // a save with nothing to read goes on; one with something must not
    ++scene_.tally.dropped;
    std::filesystem::remove(path);  // if it exists yet
}

void Caller::settle(Saved saved) {
    SaveJob& job = *saved.job->operator->();
    saved.window->open();  // if it is not open
    check(job.wait_read(kEveryGroup, in(kPatience)), "all is read, or the job has failed");
    saved.slab.release();
    check(job.wait(in(kPatience)), "the job ends");
    if (const auto fault = job.fault()) {
        switch (fault->kind) {
            case FaultKind::kIo:
                check(scene_.storage == Storage::kFailing, describe(*fault));
                ++scene_.tally.failed;
                break;
            case FaultKind::kCancelled:
                ++scene_.tally.cancelled;
                break;
            case FaultKind::kDevice:
            case FaultKind::kShutdown:
                check(scene_.stopping, "the engine was not shut down");
                ++scene_.tally.shut_down;
                break;
            case FaultKind::kCorrupt:
            case FaultKind::kLost:
                check(false, describe(*fault));
        }
    } else {
        ++scene_.tally.durable;
        for (const Target& file : saved.files) {
            check(read_file(file.path) == file.sample->file, file.path);
            restore(file);
        }
    }
    for (const Target& file : saved.files) std::filesystem::remove(file.path);
}

void Caller::restore(const Target& file) {
    const Bytes& stream = file.sample->source.stream;
    Bytes out(stream.size(), std::byte{0});
    Transfer transfer;
    for (const Range& region : file.sample->source.regions) {
        transfer.add(region.begin, region.size(), out.data() + region.begin, 0);
    }
    std::shared_ptr<RestoreHandle> job;
    try {
        job = scene_.engine.restore(
            {RestoreFile(file.path, file.sample->file.size(), stream.size(), transfer)});
    } catch (const std::runtime_error&) {
        check(scene_.stopping, "an engine that is in use restores");
        return;
    }
    const std::uint64_t fate = random_below(random_, 5);
    if (fate == 0) return;  // dropped
    if (fate == 1) job->cancel();
    check((*job)->wait(in(kPatience)), "the restore ends");
    if (const auto fault = (*job)->fault()) {
        check(fault->kind != FaultKind::kCorrupt, describe(*fault));
        check(fault->kind != FaultKind::kIo || scene_.storage == Storage::kFailing,
              describe(*fault));
        return;
    }
    check(out == stream, "restored bytes");
    ++scene_.tally.restored;
}

}  // namespace datastates::testing
