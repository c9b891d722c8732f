// Streamed saves and restores of what devices have.

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "device_stream.h"

namespace datastates::testing {
namespace {

Bytes take_all(SaveJob& job, std::size_t file) {
    Bytes bytes;
    while (auto taken = job.take(file, in(60))) {
        check(taken->ok(), taken->ok() ? "" : describe(taken->fault()));
        const auto& piece = **taken;
        if (!piece) return bytes;
        bytes.insert(bytes.end(), piece->bytes.begin(), piece->bytes.end());
    }
    check(false, "no piece comes");
    return bytes;
}

/// Fills what comes until the job ends.
void fetch_all(const RestoreHandle& job, std::span<const std::byte> file) {
    const auto requests = job.requests();
    while (auto taken = requests(in(60))) {
        const auto& request = *taken;
        if (!request) return;
        const Range bytes = request->fetch().step.bytes;
        request->fill(file.subspan(bytes.begin, bytes.size()));
    }
    check(false, "no request comes");
}

/// Saves what kernels of before have written, while kernels of after overwrite it.
void save_in_order(std::uint64_t seed, int devices, std::uint64_t size, std::uint64_t max_piece) {
    const FakeDriver driver(seed);
    const Layout layout(size, devices, max_piece, seed);
    const Tensors first(layout);
    const Tensors second(layout);
    const Training training(devices);
    const Image before = random_image(layout, seed);
    const Image after = random_image(layout, seed + 1000);
    Engine engine(kSmallCache, {}, posix_file_ops(), driver.api);
    open_devices(engine, devices);
    for (const Tensors* const tensors : {&first, &second}) {
        tensors->write_host(before);
        training.write(*tensors, before);
    }
    const auto save = engine.save_streamed({first.save_file("s3://a"), second.save_file("s3://b")},
                                           0, open_window(), training.fences(engine));
    std::vector<Bytes> files;
    {
        const std::jthread taker([&] {  // one after the other
            for (const std::size_t file : {0U, 1U}) {
                files.push_back(take_all(*save->job(), file));
                (*save)->stored(file);
            }
        });
        for (Group group = 0; group < kGroups; ++group) {
            check((*save)->wait_queued(group, in(60)), "the copies are enqueued");
            training.hold(*save, group);
        }
        training.write(first, after);
        training.write(second, after);
    }
    check_durable(*save);
    for (const Bytes& file : files) {
        check(file == reference_file(stream_of(layout, before)), "seed " + std::to_string(seed));
    }
    check_equal(fake_cuda_synchronize_all(60), 0);
    check_all_free(engine.cache());
}

void streams_have_the_bytes_at_their_fences() {
    for (std::uint64_t seed = 1; seed <= 10; ++seed) {
        save_in_order(seed, seed % 2 == 0 ? 2 : 1, 2 * kMiB + 12, kMiB / 8);
    }
    save_in_order(11, 2, 4 * kSegmentBytes - 12, 3 * kMiB);
}

void restore_in_order(std::uint64_t seed, int devices, std::uint64_t size,
                      std::uint64_t max_piece) {
    const FakeDriver driver(seed);
    const Layout layout(size, devices, max_piece, seed);
    const Tensors tensors(layout);
    const Training training(devices);
    const Image saved = random_image(layout, seed);
    Engine engine(kSmallCache, {}, posix_file_ops(), driver.api);
    open_devices(engine, devices);
    training.write(tensors, random_image(layout, seed + 1000));
    const auto restore =
        engine.restore_streamed({tensors.restore_file("s3://a")}, training.fences(engine));
    fetch_all(*restore, reference_file(stream_of(layout, saved)));
    check_restored(*restore);
    check(stream_of(layout, tensors.image()) == stream_of(layout, saved),
          "seed " + std::to_string(seed));
    check_all_free(engine.cache());
}

void what_is_fetched_comes_after_kernels_before_its_fence() {
    for (std::uint64_t seed = 1; seed <= 10; ++seed) {
        restore_in_order(seed, seed % 2 == 0 ? 2 : 1, 2 * kMiB + 12, kMiB / 8);
    }
    restore_in_order(11, 2, 4 * kSegmentBytes, 2 * kMiB);
}

void a_failed_restore_ends_when_devices_are_done_with_its_memory() {
    const FakeDriver driver;
    const Layout layout(2 * kSegmentBytes, 2, kMiB, 1);
    const Tensors tensors(layout);
    {
        Engine engine(kSmallCache, {}, posix_file_ops(), driver.api);
        open_devices(engine, 2);
        const Bytes file = reference_file(stream_of(layout, random_image(layout, 1)));
        std::shared_ptr<RestoreHandle> restore;
        const Stall stall;
        restore = engine.restore_streamed({tensors.restore_file("s3://a")});
        const std::jthread fetching([&] { fetch_all(*restore, file); });
        while (fake_cuda_count("pending") == 0) std::this_thread::yield();
        restore->fail(not_transferred("no answer", 0, "s3://a"));
        check(!(*restore)->wait(in(0.05)), "devices still write to the tensors");
        fake_cuda_stall(0);
        check((*restore)->wait(in(60)));
        check((*restore)->fault()->kind == FaultKind::kTransfer);
        check_all_free(engine.cache());
    }
    check_nothing_left();
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<streams_have_the_bytes_at_their_fences,
                     what_is_fetched_comes_after_kernels_before_its_fence,
                     a_failed_restore_ends_when_devices_are_done_with_its_memory>();
}
