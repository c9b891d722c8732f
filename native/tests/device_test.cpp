// Saves and restores of what devices have: which bytes, in which order with the training process.

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "device_stream.h"
#include "hooked_device_api.h"

namespace datastates::testing {
namespace {

/// How a training step and a save meet.
struct Meeting {
    int devices = 1;
    std::uint64_t size = 3 * kMiB / 2 + 12;
    std::uint64_t max_piece = kMiB / 8;
    bool fenced = true;
    bool gated = true;
    bool right_stream = true;
    bool lying = false;
};

/// A kernel that takes so many milliseconds.
void spend(void* milliseconds) {
    std::this_thread::sleep_for(
        std::chrono::milliseconds(*static_cast<std::uint64_t*>(milliseconds)));
}

/// Saves what kernels of before have written, while kernels of after overwrite it. True if the file
/// has what it should.
bool saves_what_was_at_the_fence(std::uint64_t seed, const Meeting& how) {
    const TemporaryDirectory directory;
    const bool goes_wrong = how.lying || !how.fenced || !how.gated || !how.right_stream;
    const FakeDriver driver(seed, goes_wrong ? 5000 : 200);
    if (goes_wrong) fake_cuda_configure(0, 0, 0, kMiB / 64);
    std::uint64_t late = 4 * (seed % 8);
    const Layout layout(how.size, how.devices, how.max_piece, seed);
    const Tensors tensors(layout);
    const Training training(how.devices);
    const Training elsewhere(how.devices);
    const Image before = random_image(layout, seed);
    const Image after = random_image(layout, seed + 1000);
    const auto api = std::make_shared<HookedDeviceApi>(driver.api);
    Engine engine(kSmallCache, {}, posix_file_ops(), api);
    open_devices(engine, how.devices);
    if (how.lying) api->lie();

    tensors.write_host(before);
    for (int device = 0; device < how.devices; ++device) {
        check_equal(fake_cuda_launch(device, training.stream(device), &spend, &late), 0);
    }
    training.write(tensors, before);
    auto fences = training.fences(engine);
    if (!how.fenced) fences.clear();
    const std::vector<SaveFile> files{tensors.save_file(directory.file("f"))};
    const auto save = engine.save(files, {}, 0, open_window(), std::move(fences));
    for (Group group = 0; group < kGroups; ++group) {
        check((*save)->wait_queued(group, in(60)), "the copies are enqueued");
        if (how.gated) (how.right_stream ? training : elsewhere).hold(*save, group);
    }
    training.write(tensors, after);
    tensors.write_host(after);
    check_durable(*save);
    check((*save)->wait_read(kEveryGroup, in(0)));
    check_equal(fake_cuda_synchronize_all(60), 0);
    check_equal(fake_cuda_count("pageable_copies"), 0U);
    check(tensors.image() == after, "nothing else has changed the tensors");
    return read_file(directory.file("f")) == reference_file(stream_of(layout, before));
}

void check_saves(std::uint64_t seeds, const Meeting& how) {
    for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
        check(saves_what_was_at_the_fence(seed, how), "seed " + std::to_string(seed));
    }
}

void a_save_has_the_bytes_at_its_fence() {
    check_saves(15, {});
}

void a_save_of_two_devices_has_the_bytes_at_its_fences() {
    check_saves(15, {.devices = 2});
}

void a_save_larger_than_the_cache_has_the_bytes_at_its_fence() {
    check_saves(2, {.devices = 2, .size = 5 * kSegmentBytes - 12, .max_piece = 3 * kMiB});
}

/// The tests above can fail.
void check_goes_wrong(const Meeting& how) {
    constexpr std::uint64_t kSeeds = 100;
    for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
        if (!saves_what_was_at_the_fence(seed, how)) return;
    }
    check(false, "it went well every time");
}

void without_the_fence_bytes_are_wrong() {
    check_goes_wrong({.fenced = false});
}

void without_the_gate_bytes_are_wrong() {
    check_goes_wrong({.gated = false});
}

void with_the_gate_on_another_stream_bytes_are_wrong() {
    check_goes_wrong({.right_stream = false});
}

void memory_used_before_a_copy_is_done_has_wrong_bytes() {
    check_goes_wrong({.lying = true});
}

/// A strided region whose runs lie in the first and the last segment: none for a device to copy in
/// between.
void a_box_may_pass_over_segments() {
    const TemporaryDirectory directory;
    const FakeDriver driver;
    Engine engine(kSmallCache, {}, posix_file_ops(), driver.api);
    open_devices(engine, 1);
    const auto memory = device_memory(0, 2 * kMiB);
    std::ranges::copy(random_bytes(memory.size(), 1), memory.begin());
    constexpr std::uint64_t kStride = 3 * kSegmentBytes;
    Transfer transfer;
    transfer.add_strided(
        0, kMiB,
        std::vector<Axis>{
            {.size = 2, .stream_stride = kStride, .memory_stride = std::int64_t{kMiB}}},
        memory.data(), 0, 0);
    const SaveFile file(directory.file("f"), kStride + kMiB, transfer);
    check_durable(*engine.save({file}, {}, 0, open_window()));
    Bytes stream(kStride + kMiB);
    std::ranges::copy(memory.first(kMiB), stream.begin());
    std::ranges::copy(memory.last(kMiB), stream.begin() + kStride);
    check(read_file(directory.file("f")) == reference_file(stream));
    check_equal(fake_cuda_count("copies"), 2U);
    std::map<int, DeviceWork> work;
    file.content->list(Direction::kGather, {.begin = kSegmentBytes, .end = 2 * kSegmentBytes},
                       nullptr, work);
    check(work.empty(), "devices have nothing to do for a gap");
}

/// Saves two devices' pieces of up to 2,000 bytes, some of them rows of strided tensors, and
/// restores them over others.
void check_small_pieces(const FakeDriver& driver) {
    const TemporaryDirectory directory;
    const std::string path = directory.file("f");
    const Layout layout(kMiB, 2, 2000, 8);
    const Tensors saved(layout);
    const Tensors restored(layout);
    const Training training(2);
    const Image image = random_image(layout, 1);
    saved.write_host(image);
    training.write(saved, image);
    Engine engine(kSmallCache, {}, posix_file_ops(), driver.api);
    open_devices(engine, 2);
    check_durable(
        *engine.save({saved.save_file(path)}, {}, 0, open_window(), training.fences(engine)));
    check(read_file(path) == reference_file(stream_of(layout, image)));
    check_restored(*engine.restore({restored.restore_file(path)}));
    check(stream_of(layout, restored.image()) == stream_of(layout, image));
    check(fake_cuda_count("copies") > 1000, "the pieces are many");
}

void small_pieces_are_copied_one_by_one() {
    const FakeDriver driver;
    check_small_pieces(driver);
    check_equal(fake_cuda_count("cuMemcpyDtoHAsync_v2") + fake_cuda_count("cuMemcpyHtoDAsync_v2"),
                fake_cuda_count("copies"));
}

/// Restores over what kernels of before write.
void restore_in_order(std::uint64_t seed, int devices, std::uint64_t size,
                      std::uint64_t max_piece) {
    const TemporaryDirectory directory;
    const FakeDriver driver(seed);
    const Layout layout(size, devices, max_piece, seed);
    const Tensors tensors(layout);
    const Training training(devices);
    const Image saved = random_image(layout, seed);
    Engine engine(kSmallCache, {}, posix_file_ops(), driver.api);
    open_devices(engine, devices);
    write_file(directory.file("f"), reference_file(stream_of(layout, saved)));
    training.write(tensors, random_image(layout, seed + 1000));
    const auto restore =
        engine.restore({tensors.restore_file(directory.file("f"))}, training.fences(engine));
    check_restored(*restore);
    check(stream_of(layout, tensors.image()) == stream_of(layout, saved),
          "seed " + std::to_string(seed));
    check_equal(fake_cuda_count("pageable_copies"), 0U);
}

void a_restore_comes_after_kernels_before_its_fence() {
    for (std::uint64_t seed = 1; seed <= 15; ++seed) {
        restore_in_order(seed, seed % 2 == 0 ? 2 : 1, 2 * kMiB + 12, kMiB / 8);
    }
    restore_in_order(16, 2, 4 * kSegmentBytes, 2 * kMiB);
}

void a_corrupt_file_is_a_fault_of_its_restore() {
    const TemporaryDirectory directory;
    const FakeDriver driver;
    const Layout layout(2 * kSegmentBytes, 2, kMiB, 1);
    const Tensors tensors(layout);
    {
        Engine engine(kSmallCache, {}, posix_file_ops(), driver.api);
        open_devices(engine, 2);
        Bytes file = reference_file(stream_of(layout, random_image(layout, 1)));
        file[layout.size - kMiB / 2] ^= std::byte{1};
        write_file(directory.file("f"), file);
        const auto restore = engine.restore({tensors.restore_file(directory.file("f"))});
        check((*restore)->wait(in(60)));
        check((*restore)->fault()->kind == FaultKind::kCorrupt);
        check_all_free(engine.cache());
    }
    check_nothing_left();
}

void a_cancelled_restore_ends_when_devices_are_done_with_its_memory() {
    const TemporaryDirectory directory;
    const FakeDriver driver;
    const Layout layout(2 * kSegmentBytes, 2, kMiB, 1);
    const Tensors tensors(layout);
    {
        Engine engine(kSmallCache, {}, posix_file_ops(), driver.api);
        open_devices(engine, 2);
        write_file(directory.file("f"), reference_file(stream_of(layout, random_image(layout, 1))));
        std::shared_ptr<RestoreHandle> restore;
        const Stall stall;
        restore = engine.restore({tensors.restore_file(directory.file("f"))});
        while (fake_cuda_count("pending") == 0) std::this_thread::yield();
        restore->cancel();
        check(!(*restore)->wait(in(0.05)), "devices still write to the tensors");
        fake_cuda_stall(0);
        check((*restore)->wait(in(60)));
        check((*restore)->fault()->kind == FaultKind::kCancelled);
        check_all_free(engine.cache());
    }
    check_nothing_left();
}

void all_of_the_cache_is_pinned_until_it_is_unmapped() {
    const FakeDriver driver;
    const auto arenas_pinned = [](const Engine& engine) {
        return engine.cache().unpinned().empty() && fake_cuda_count("live_registrations") > 0;
    };
    const auto check_pinned = [](const std::byte* data, std::uint64_t nbytes) {
        for (std::uint64_t at = 0; at < nbytes; at += kMiB) {  // it may be pinned in two pieces
            check_equal(fake_cuda_is_registered(data + at, kMiB), 1);
        }
    };
    {
        Engine engine(kSmallCache, {}, posix_file_ops(), driver.api);
        const auto memory = engine.cache().unpinned();
        check_equal(memory.size(), 1U);
        open_devices(engine, 1);
        check(arenas_pinned(engine));
        check_pinned(memory[0].bytes.data(), kSmallCache);
        engine.grow(2 * kSmallCache);
        wait_until_prepared(engine);
        check(fake_cuda_count("live_registrations") >= 2, "what was gained is pinned, too");
        check_equal(fake_cuda_context_references(0), 1);
        check_equal(fake_cuda_contexts_created(1), 0U);
        auto slab = std::make_unique<HostCache::SlabRequest>(engine.shared_cache(), 8, 0);
        check(slab->wait_until(in(60)) == HostCache::SlabRequest::State::kGranted);
        const Lease lease = slab->take();
        engine.shutdown();
        check_pinned(lease.data(), kSegmentBytes);
    }
    check_nothing_left();
    check_equal(fake_cuda_context_references(0), 0);
    check_equal(fake_cuda_count("pageable_copies"), 0U);
}

void copies_wait_for_their_memory_to_be_pinned() {
    const TemporaryDirectory directory;
    const FakeDriver driver;
    const auto api = std::make_shared<HookedDeviceApi>(driver.api);
    api->pin_slowly(std::chrono::milliseconds(100));
    const Layout layout(2 * kSegmentBytes, 1, kMiB, 1);
    const Tensors tensors(layout);
    Engine engine(kSmallCache, {}, posix_file_ops(), api);
    check_ok(engine.devices().open(0));
    check_durable(*engine.save({tensors.save_file(directory.file("f"))}, {}, 0, open_window()));
    Bytes room(2 * kMiB);  // not pinned
    // Aligned to its size: a copy is cut where its memory crosses a multiple of kPinBytes.
    const auto address = reinterpret_cast<std::uintptr_t>(room.data());
    std::byte* const other = room.data() + (kMiB - address % kMiB) % kMiB;
    const auto device = device_memory(0, kMiB);
    Transfer transfer;
    transfer.add(0, kMiB, device.data(), 0, Access::kReadWrite, 0);
    engine.grow(2 * kSmallCache);
    check_equal(fake_cuda_count("pageable_copies"), 0U);
    check_ok(engine.copy_to_host(StreamContent(transfer), other, 0, 0).status);
    check_equal(fake_cuda_count("pageable_copies"), 1U);
    check_equal(fake_cuda_synchronize_all(60), 0);
}

void restores_wait_for_their_memory_to_be_pinned() {
    const TemporaryDirectory directory;
    const FakeDriver driver;
    const Layout layout(2 * kSegmentBytes, 1, kMiB, 1);
    const Tensors tensors(layout);
    {
        Engine engine(kSmallCache, {}, posix_file_ops(), driver.api);
        check_ok(engine.devices().open(0));
        check_durable(*engine.save({tensors.save_file(directory.file("f"))}, {}, 0, open_window()));
    }
    const auto before = fake_cuda_count("pageable_copies");
    const auto api = std::make_shared<HookedDeviceApi>(driver.api);
    api->pin_slowly(std::chrono::milliseconds(300));
    Engine engine(kSmallCache, {}, posix_file_ops(), api);
    check_ok(engine.devices().open(0));
    const auto restore = engine.restore({tensors.restore_file(directory.file("f"))});
    check_restored(*restore);
    check_equal(fake_cuda_count("pageable_copies"), before);
}

/// In a driver that pins slowly, or not at all because a device hangs.
void reads_end_though_their_memory_is_never_pinned() {
    const TemporaryDirectory directory;
    const FakeDriver driver;
    const auto api = std::make_shared<HookedDeviceApi>(driver.api);
    api->pin_slowly(std::chrono::seconds(3));
    const Layout layout(2 * kSegmentBytes, 1, kMiB, 1);
    const Tensors tensors(layout);
    Engine engine(kSmallCache, {}, posix_file_ops(), api, std::chrono::milliseconds(100));
    check_ok(engine.devices().open(0));
    const auto save = engine.save({tensors.save_file(directory.file("f"))}, {}, 0, open_window());
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    engine.devices().limit_patience();
    check((*save)->wait_read(kEveryGroup, in(2)), "it waits for the memory");
    check((*save)->fault()->kind == FaultKind::kShutdown);
}

void reads_that_hang_are_given_up_together() {
    const TemporaryDirectory directory;
    const FakeDriver driver;
    const Layout layout(2 * kSegmentBytes, 1, kSegmentBytes, 1);
    const Tensors tensors(layout);
    Engine engine(16 * kSegmentBytes, {}, posix_file_ops(), driver.api, std::chrono::seconds(1));
    check_ok(engine.devices().open(0));
    while (!engine.devices().pinner().idle()) std::this_thread::yield();
    const Stall stall;
    const auto save = engine.save({tensors.save_file(directory.file("f"))}, {}, 0, open_window());
    while (!(*save)->wait_queued(0, in(1))) {
    }
    const auto start = Clock::now();
    engine.devices().limit_patience();
    while (!(*save)->wait_read(kEveryGroup, in(1))) {
    }
    const auto took = std::chrono::duration<double>(Clock::now() - start).count();
    check(took < 1.8, "it took " + std::to_string(took) + " s");
}

void nothing_of_the_engine_breaks_a_capture() {
    const TemporaryDirectory directory;
    const FakeDriver driver;
    const Layout layout(kSegmentBytes + 4, 2, kMiB / 2, 1);
    const Tensors tensors(layout);
    const StreamHandle captured = training_stream(0);
    const StreamHandle stream = training_stream(0);
    training_stream(1);  // a tensor is on a device that has a context
    {
        check_equal(fake_cuda_begin_capture(0, captured, 0), 0);  // by this thread, global
        Engine engine(kSmallCache, {}, posix_file_ops(), driver.api);
        const auto work = [&](const std::string& path) {
            open_devices(engine, 2);
            const auto fence = value_of(engine.devices().find(0)->record(stream));
            const auto save = engine.save({tensors.save_file(path)}, {}, 0, open_window(), {fence});
            check_durable(*save);
            check_restored(*engine.restore({tensors.restore_file(path)}, {fence}));
            check_ok(fence->is_done());
        };
        std::jthread(work, directory.file("a")).join();
        check_equal(fake_cuda_capture_invalidated(0, captured), 0);
        work(directory.file("b"));  // the capturing thread's own calls
        check_equal(fake_cuda_capture_invalidated(0, captured), 0);
        const Entered entered(*driver.api, 0);
        // This thread's is what it was.
        check_equal(value_of(driver.api->exchange_capture(kRelaxedCapture)), 0);
        check_ok(driver.api->exchange_capture(0));
    }
    check_equal(fake_cuda_end_capture(0, captured), 0);
    check_nothing_left();
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<
        a_save_has_the_bytes_at_its_fence, a_save_of_two_devices_has_the_bytes_at_its_fences,
        a_save_larger_than_the_cache_has_the_bytes_at_its_fence, without_the_fence_bytes_are_wrong,
        without_the_gate_bytes_are_wrong, with_the_gate_on_another_stream_bytes_are_wrong,
        memory_used_before_a_copy_is_done_has_wrong_bytes, a_box_may_pass_over_segments,
        small_pieces_are_copied_one_by_one, a_restore_comes_after_kernels_before_its_fence,
        a_corrupt_file_is_a_fault_of_its_restore,
        a_cancelled_restore_ends_when_devices_are_done_with_its_memory,
        all_of_the_cache_is_pinned_until_it_is_unmapped, copies_wait_for_their_memory_to_be_pinned,
        restores_wait_for_their_memory_to_be_pinned, reads_end_though_their_memory_is_never_pinned,
        reads_that_hang_are_given_up_together, nothing_of_the_engine_breaks_a_capture>();
}
