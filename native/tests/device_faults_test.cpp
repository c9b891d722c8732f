// Drivers that fail, hang or go, and memory that runs out: jobs end, and nothing is reused or left.

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "check.h"
#include "device_stream.h"
#include "hooked_device_api.h"

namespace datastates::testing {
namespace {

constexpr std::chrono::milliseconds kPatience(300);

/// An engine with two devices, tensors there, and files of them.
struct Scene {
    explicit Scene(const HookedDeviceApi::Hook& hook = nullptr,
                   Layout what = {kSegmentBytes + kMiB, 2, kMiB, 1},
                   std::shared_ptr<FileOps> ops = posix_file_ops())
        : layout(std::move(what)) {
        fake_cuda_configure(0, 0, 50, kMiB / 2);
        engine = std::make_unique<Engine>(kSmallCache, ThreadCounts{}, std::move(ops),
                                          std::make_shared<HookedDeviceApi>(driver.api, hook),
                                          kPatience);
        open_devices(*engine, 2);
        training = std::make_unique<Training>(2);
        write_file(directory.file("saved"),
                   reference_file(stream_of(layout, random_image(layout, 1))));
    }

    std::shared_ptr<SaveHandle> save(Fences fences) {
        return engine->save({tensors.save_file(directory.file(std::to_string(++files)))}, {}, 0,
                            open_window(), std::move(fences));
    }
    std::shared_ptr<SaveHandle> save() { return save(training->fences(*engine)); }
    [[nodiscard]] std::shared_ptr<RestoreHandle> restore(Fences fences) const {
        return engine->restore({restored.restore_file(directory.file("saved"))}, std::move(fences));
    }
    [[nodiscard]] std::shared_ptr<RestoreHandle> restore() const {
        return restore(training->fences(*engine));
    }
    void check_works() {
        check_durable(*save());
        check(read_file(directory.file(std::to_string(files))) ==
              reference_file(stream_of(layout, tensors.image())));
        check_restored(*restore());
        check(stream_of(layout, restored.image()) == stream_of(layout, random_image(layout, 1)));
        check_all_free(engine->cache());
    }

    /// Without the engine, nothing of it is left in the driver. (All handles are gone.)
    void end() {
        engine.reset();
        check_nothing_left();
    }

    TemporaryDirectory directory;
    FakeDriver driver;
    Layout layout;
    Tensors tensors{layout};   // saved
    Tensors restored{layout};  // others: both may go on at once
    std::unique_ptr<Engine> engine;
    std::unique_ptr<Training> training;
    int files = 0;
};

void wait_until_both_are_copied() {
    wait_until("both are copied", [] {
        return fake_cuda_count("bytes_to_host") > 0 && fake_cuda_count("bytes_to_device") > 0;
    });
}

void wait_for_calls(const char* symbol, std::uint64_t more) {
    const std::uint64_t wanted = fake_cuda_count(symbol) + more;
    wait_until(symbol, [&] { return fake_cuda_count(symbol) >= wanted; });
}

void check_fault_of(const std::optional<Fault>& fault, const std::string& symbol) {
    check(fault.has_value(), symbol + " did not fail the job");
    check(fault->kind == FaultKind::kDevice, describe(*fault));
    check(fault->operation == symbol, describe(*fault));
    check_equal(fault->error, 2);
}

struct FaultyCall {
    const char* symbol = "";
    int skip = 0;
};

/// One segment, but for calls that only a second one makes.
Layout layout_for(const FaultyCall& call) {
    const bool copies = std::string_view(call.symbol).starts_with("cuMemcpy");
    const std::uint64_t second = call.skip < 2 || copies ? 0 : kSegmentBytes;
    return {second + 2 * kMiB, 2, kMiB / 4, 1};
}

void fails_a_save(const FaultyCall& call) {
    Scene scene(nullptr, layout_for(call));
    const std::string symbol = call.symbol;
    if (symbol != "cuEventCreate") scene.check_works();  // or there would be events to spare
    {
        auto fences = scene.training->fences(*scene.engine);
        check_equal(fake_cuda_fail_next(symbol.c_str(), 2, call.skip), 0);
        const auto save = scene.save(std::move(fences));
        check((*save)->wait(in(60)), "the save ends");
        check_fault_of((*save)->fault(), symbol);
        for (Group group = kEveryGroup; group < kGroups; ++group) {
            check((*save)->wait_read(group, in(60)));
            check((*save)->wait_queued(group, in(60)));
        }
        check_all_free(scene.engine->cache());
    }
    scene.check_works();
    scene.end();
}

void faults_of_the_driver_fail_a_save() {
    for (const int skip : {0, 1, 2}) {  // whichever device is first, and one of a shared unit
        fails_a_save({.symbol = "cuEventRecord", .skip = skip});
        fails_a_save({.symbol = "cuEventQuery", .skip = skip});
    }
    // A stream waits once for the fence of its device, whatever it copies then.
    for (const int skip : {0, 1}) fails_a_save({.symbol = "cuStreamWaitEvent", .skip = skip});
    for (const int skip : {0, 1}) fails_a_save({.symbol = "cuEventCreate", .skip = skip});
    for (const int skip : {0, 1, 5}) {
        fails_a_save({.symbol = "cuMemcpyDtoHAsync_v2", .skip = skip});
    }
}

void fails_a_restore(const FaultyCall& call) {
    Scene scene(nullptr, layout_for(call));
    const std::string symbol = call.symbol;
    if (symbol != "cuEventCreate") scene.check_works();  // or there would be events to spare
    {
        auto fences = scene.training->fences(*scene.engine);
        check_equal(fake_cuda_fail_next(symbol.c_str(), 2, call.skip), 0);
        const auto restore = scene.restore(std::move(fences));
        check((*restore)->wait(in(60)), "the restore ends");
        check_fault_of((*restore)->fault(), symbol);
    }
    scene.check_works();
    scene.end();
}

void faults_of_the_driver_fail_a_restore() {
    for (const int skip : {0, 1}) {
        fails_a_restore({.symbol = "cuEventCreate", .skip = skip});
        fails_a_restore({.symbol = "cuEventRecord", .skip = skip});
        fails_a_restore({.symbol = "cuStreamWaitEvent", .skip = skip});
        fails_a_restore({.symbol = "cuEventQuery", .skip = skip});
        fails_a_restore({.symbol = "cuMemcpyHtoDAsync_v2", .skip = 3 * skip});
    }
}

void check_frees_nothing_in_use(const FaultyCall& call) {
    // One segment of one device: nothing else keeps the job from its end.
    Scene scene(nullptr, {3 * kMiB, 1, kMiB / 4, 1});
    {
        std::shared_ptr<SaveHandle> save;
        const Stall stall;
        auto fences = scene.training->fences(*scene.engine);
        check_equal(fake_cuda_fail_next(call.symbol, 2, call.skip), 0);
        save = scene.save(std::move(fences));
        check(!(*save)->wait(in(0.05)), "it ends before the copies do");
        wait_for_calls("cuEventQuery", 5);
        check(!(*save)->wait_read(kEveryGroup, in(0)));
        const auto stats = scene.engine->cache().stats();
        check(stats.free_segments < stats.total_segments);
        fake_cuda_stall(0);
        check((*save)->wait(in(60)));
        check_fault_of((*save)->fault(), call.symbol);
        check_all_free(scene.engine->cache());
    }
    scene.check_works();
    scene.end();
}

void a_fault_does_not_free_what_is_being_copied() {
    check_frees_nothing_in_use({.symbol = "cuEventRecord"});
    check_frees_nothing_in_use({.symbol = "cuEventQuery"});
    check_frees_nothing_in_use({.symbol = "cuMemcpyDtoHAsync_v2", .skip = 2});
}

void without_pinned_memory_saves_and_restores_go_on() {
    const TemporaryDirectory directory;
    const FakeDriver driver;
    const Layout layout(kMiB, 1, kMiB / 4, 1);
    const Tensors tensors(layout);
    {
        check_equal(fake_cuda_fail_next("cuMemHostRegister_v2", 2, 0), 0);
        Engine engine(kSmallCache, {}, posix_file_ops(), driver.api);
        check_ok(engine.devices().open(0));
        wait_until("pinning fails", [&] { return engine.devices().pinner().fault().has_value(); });
        check_fault_of(engine.devices().pinner().fault(), "cuMemHostRegister_v2");
        check_equal(engine.devices().pinner().pinned_bytes(), 0U);
        const Image saved = tensors.image();
        check_durable(*engine.save({tensors.save_file(directory.file("f"))}, {}, 0, open_window()));
        check_restored(*engine.restore({tensors.restore_file(directory.file("f"))}));
        check(stream_of(layout, tensors.image()) == stream_of(layout, saved));
        check(fake_cuda_count("pageable_copies") > 0);
        engine.grow(2 * kSmallCache);
        wait_until("what is new is pinned",
                   [&] { return engine.devices().pinner().pinned_bytes() > 0; });
    }
    check_nothing_left();
}

/// Memory runs out in the first call of this name once it is armed.
void memory_runs_out_in(std::string_view call) {
    std::atomic<bool> armed = false;
    Scene scene([&](std::string_view made) -> std::optional<Fault> {
        if (made == call && armed.exchange(false)) throw std::bad_alloc();
        return std::nullopt;
    });
    const auto check_out_of_memory = [&](const std::optional<Fault>& fault) {
        check(fault && fault->kind == FaultKind::kIo && fault->error == ENOMEM, call);
    };
    auto fences = scene.training->fences(*scene.engine);
    std::shared_ptr<SaveHandle> save;
    const Stall stall;
    armed = true;
    save = scene.save(std::move(fences));
    wait_until("memory runs out", [&] { return !armed; });
    wait_for_calls("cuEventQuery", 20);
    check(!(*save)->wait(in(0.02)), "copies are under way, of the other device at least");
    fake_cuda_stall(0);
    check((*save)->wait(in(60)));
    check_out_of_memory((*save)->fault());
    fences = scene.training->fences(*scene.engine);
    armed = true;
    const auto restore = scene.restore(std::move(fences));
    check((*restore)->wait(in(60)));
    check_out_of_memory((*restore)->fault());
    check_all_free(scene.engine->cache());
    scene.check_works();
}

void want_of_memory_fails_jobs_and_frees_nothing_in_use() {
    for (const char* call : {"create_event", "stream_wait", "copy", "record", "is_done"}) {
        memory_runs_out_in(call);
    }
}

void an_error_that_stays_ends_all_jobs() {
    for (const bool stalled : {false, true}) {
        Scene scene;
        if (stalled) fake_cuda_stall(1);
        const auto save = scene.save();
        const auto restore = scene.restore();
        if (stalled) wait_until_both_are_copied();
        fake_cuda_poison(700);
        check((*save)->wait(in(60)));
        check((*restore)->wait(in(60)));
        check((*save)->wait_read(kEveryGroup, in(60)));
        check((*save)->wait_queued(0, in(60)));
        if (stalled) {
            check_error((*save)->fault(), 700);
            check_error((*restore)->fault(), 700);
        }
        fake_cuda_stall(0);
        check_equal(fake_cuda_synchronize_all(60), 700);
        check_all_free(scene.engine->cache());
        scene.engine->shutdown();
    }
}

void a_driver_that_is_gone_does_not_keep_a_shutdown() {
    Scene scene;
    std::shared_ptr<SaveHandle> save;
    std::shared_ptr<RestoreHandle> restore;
    const Stall stall;
    save = scene.save();
    restore = scene.restore();
    wait_for_calls("cuEventQuery", 4);
    fake_cuda_poison(4);
    fake_cuda_stall(0);
    scene.engine->shutdown();
    check((*save)->wait(in(60)));
    check((*save)->fault().has_value());
    check((*restore)->wait(in(60)));
    fake_cuda_synchronize_all(60);
    check_all_free(scene.engine->cache());
    check_equal(fake_cuda_count("early_unregistrations"), 0U);
}

void a_hanging_device_does_not_keep_a_shutdown() {
    auto scene = std::make_unique<Scene>();
    std::shared_ptr<SaveHandle> save;
    std::shared_ptr<RestoreHandle> restore;
    const Stall stall;
    save = scene->save();
    restore = scene->restore();
    wait_until_both_are_copied();
    save->cancel();
    restore->cancel();
    check(!(*save)->wait(in(0.05)), "the device may still write to the cache");
    check(!(*restore)->wait(in(0.05)), "the device may still write to the tensors");
    const auto begin = Clock::now();
    scene->engine->shutdown();
    const auto took = Clock::now() - begin;
    check(took >= kPatience && took < kPatience + std::chrono::seconds(5), "it is patient");
    for (const auto& fault : {(*save)->fault(), (*restore)->fault()}) {
        check(fault && fault->kind == FaultKind::kCancelled);
    }
    check((*save)->wait(in(0)) && (*save)->wait_read(kEveryGroup, in(0)));
    check((*restore)->wait(in(0)));
    const auto stats = scene->engine->cache().stats();
    check(stats.free_segments < stats.total_segments, "what is in use is never free");
    const std::weak_ptr<HostCache> cache = scene->engine->shared_cache();
    save.reset();
    restore.reset();
    scene->engine.reset();
    check(!cache.expired(), "it is not unmapped");
    check(fake_cuda_count("live_registrations") > 0, "it is still pinned");
    fake_cuda_stall(0);  // it was only late
    check_equal(fake_cuda_synchronize_all(60), 0);
    check_equal(fake_cuda_count("early_unregistrations"), 0U);
    check_equal(fake_cuda_count("violations"), 0U);
}

/// On one core, these run on whenever no other thread wants to.
void starve_lanes() {
    for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string name;
        std::ifstream(thread.path() / "comm") >> name;
        if (name.starts_with("ds-from-")) starve(std::stoi(thread.path().filename()));
    }
}

void a_shutdown_as_a_read_ends_ends_the_save() {
    const OneCore one_core;
    for (int round = 0; round < 10; ++round) {
        Scene scene(nullptr, {2 * kMiB, 1, kMiB / 4, 1});
        scene.check_works();
        starve_lanes();
        const auto save = scene.save();
        // The lane's thread says so, and has yet to pass on what it read when this one goes on.
        check((*save)->wait_read(kEveryGroup, in(60)));
        scene.engine->shutdown();
        check((*save)->wait(in(20)), "the save ends");
        const auto fault = (*save)->fault();
        check(!fault || fault->kind == FaultKind::kShutdown);
        check_all_free(scene.engine->cache());
    }
}

void a_restore_ends_whose_segments_a_hanging_device_has() {
    Scene scene(nullptr, {6 * kSegmentBytes, 1, kMiB, 1});
    std::shared_ptr<RestoreHandle> restore;
    std::shared_ptr<RestoreHandle> next;
    const Stall stall;
    restore = scene.restore();
    wait_until("it is copied", [] { return fake_cuda_count("bytes_to_device") > 0; });
    scene.engine->devices().limit_patience();
    check((*restore)->wait(in(20)), "threads wait for a segment that never comes back");
    check((*restore)->fault().has_value());
    next = scene.restore();
    check((*next)->wait(in(20)), "it will never get a segment");
    check((*next)->fault()->kind == FaultKind::kDevice);
    fake_cuda_stall(0);
    check_equal(fake_cuda_synchronize_all(60), 0);
}

void saves_and_slabs_end_whose_segments_a_hanging_device_has() {
    using State = HostCache::SlabRequest::State;
    Scene scene(nullptr, {6 * kSegmentBytes, 1, kMiB, 1});
    const Source on_host(2 * kMiB, kMiB, 1);
    std::shared_ptr<SaveHandle> hangs;
    std::shared_ptr<SaveHandle> other;
    HostCache& cache = scene.engine->cache();
    Lease last = cache.acquire(Share::kSave, 0, cache.epoch());  // as another device would have it
    const Stall stall;
    auto fences = scene.training->fences(*scene.engine);
    const std::uint64_t events = fake_cuda_count("cuEventRecord");
    hangs = scene.save(std::move(fences));
    wait_until("the device has the other segments",
               [&] { return fake_cuda_count("cuEventRecord") == events + DeviceLane::kMostParts; });
    HostCache::SlabRequest before(scene.engine->shared_cache(), kSegmentBytes, 1);
    check(before.wait_until(Clock::now()) == State::kWaiting);
    last.abandon();
    scene.engine->devices().limit_patience();
    check((*hangs)->wait(in(20)));
    check((*hangs)->fault().has_value());
    other =
        scene.engine->save({SaveFile(scene.directory.file("other"), 2 * kMiB, on_host.transfer)},
                           {}, 1, open_window());
    check((*other)->wait(in(20)), "it will never get a segment");
    check((*other)->fault()->kind == FaultKind::kDevice);
    HostCache::SlabRequest after(scene.engine->shared_cache(), kSegmentBytes, 2);
    check(before.wait_until(in(20)) == State::kNeverFits);
    check(after.wait_until(in(20)) == State::kNeverFits);
    fake_cuda_stall(0);
    check_equal(fake_cuda_synchronize_all(60), 0);
}

void memory_that_a_cache_gains_is_pinned_before_it_is_copied_to() {
    const OneCore one_core;
    for (int round = 0; round < 5; ++round) {
        const auto may_write = std::make_shared<std::atomic<bool>>(false);
        const auto ops = std::make_shared<HookedFileOps>([may_write](const auto& event) {
            if (event.call == HookedFileOps::Call::kWrite) may_write->wait(false);
            return HookedFileOps::Instead{};
        });
        Scene scene(nullptr, {8 * kSegmentBytes, 1, kMiB, 1}, ops);
        wait_until_prepared(*scene.engine);
        const auto save = scene.save();
        wait_until("it wants more", [&] {
            const auto stats = scene.engine->cache().stats();
            return stats.free_segments == 1 && stats.waiting > 0;
        });
        std::jthread([&] {
            starve(gettid());  // who gets what it gains goes on before it does
            scene.engine->grow(4 * kSmallCache);
        }).join();
        check((*save)->wait_read(kEveryGroup, in(60)));
        check_equal(fake_cuda_count("pageable_copies"), 0U);
        *may_write = true;
        may_write->notify_all();
        check_durable(*save);
    }
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<
        faults_of_the_driver_fail_a_save, faults_of_the_driver_fail_a_restore,
        a_fault_does_not_free_what_is_being_copied, without_pinned_memory_saves_and_restores_go_on,
        want_of_memory_fails_jobs_and_frees_nothing_in_use, an_error_that_stays_ends_all_jobs,
        a_driver_that_is_gone_does_not_keep_a_shutdown, a_hanging_device_does_not_keep_a_shutdown,
        a_shutdown_as_a_read_ends_ends_the_save, a_restore_ends_whose_segments_a_hanging_device_has,
        saves_and_slabs_end_whose_segments_a_hanging_device_has,
        memory_that_a_cache_gains_is_pinned_before_it_is_copied_to>();
}
