// A driver as bad as real ones are: what training loses to a save, and how a save ends.

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "device_stream.h"
#include "hooked_device_api.h"

namespace datastates::testing {
namespace {

constexpr std::uint64_t kCache = 16 * kSegmentBytes;
constexpr std::uint64_t kManyCopies = 4 * DeviceLane::kMostOutstanding;

/// The fake driver, hostile in all ways.
struct HostileDriver : FakeDriver {
    HostileDriver() { check_equal(fake_cuda_be_hostile("all", 1), 0); }
};

/// A region of so many pieces, each a copy of its own, on device 0.
struct Pieces {
    explicit Pieces(std::uint64_t count) : memory(device_memory(0, 2 * count * kPiece)) {
        for (std::uint64_t n = 0; n < count; ++n) {  // with gaps, or they were one copy
            transfer.add(n * kPiece, kPiece, memory.data() + 2 * n * kPiece, 0, Access::kReadWrite,
                         0);
        }
        nbytes = count * kPiece;
    }

    static constexpr std::uint64_t kPiece = 512;
    std::span<std::byte> memory;
    Transfer transfer;
    std::uint64_t nbytes = 0;
};

std::vector<DeviceCopy> copies_of(const Pieces& pieces, std::byte* host) {
    std::vector<DeviceCopy> copies;
    for (std::uint64_t n = 0; n < pieces.nbytes / Pieces::kPiece; ++n) {
        copies.push_back({.to = host + n * Pieces::kPiece,
                          .from = pieces.memory.data() + 2 * n * Pieces::kPiece,
                          .nbytes = Pieces::kPiece});
    }
    return copies;
}

void ways_to_be_hostile_are_known() {
    const FakeDriver driver;
    for (const char* const way : {"lock", "queue", "drain", "pin_ns", "lie_us", "context", "all"}) {
        check_equal(fake_cuda_be_hostile(way, 0), 0);
    }
    check_equal(fake_cuda_be_hostile("kindness", 1), 500);
}

void a_full_queue_keeps_training_waiting() {
    const HostileDriver driver;
    check_equal(fake_cuda_be_hostile("queue", 64), 0);
    const StreamHandle training = training_stream(0);
    const Pieces pieces(64);
    Entered entered(*driver.api, 0);
    PinnedMemory pinned(*driver.api, pieces.nbytes);
    const StreamHandle own = entered.stream();
    std::byte value{7};
    std::byte* const target = device_memory(0, 1).data();
    {
        const Stall stall;
        check_ok(driver.api->copy(Direction::kGather, copies_of(pieces, pinned.data()), own));
        std::jthread late([&] { check_equal(fake_cuda_write(0, training, target, &value, 1), 0); });
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        fake_cuda_stall(0);
    }
    check(fake_cuda_count("training_wait_us") > 5000, "it waited for the engine's copies");
    check_equal(fake_cuda_synchronize_all(60), 0);
}

void an_event_may_be_told_late() {
    const FakeDriver driver;
    check_equal(fake_cuda_be_hostile("lie_us", 50'000), 0);
    Entered entered(*driver.api, 0);
    const EventHandle event = entered.event();
    const StreamHandle own = entered.stream();
    check_ok(driver.api->record(event, own));
    check_equal(fake_cuda_synchronize(0, own, 60), 0);
    check(!entered.is_done(event), "the driver lies");
    entered.wait(event);
}

void pages_are_faulted_in_before_they_are_pinned() {
    const HostileDriver driver;
    Engine engine(kCache, {}, posix_file_ops(), driver.api);
    open_devices(engine, 1);
    check(fake_cuda_count("live_registrations") >= kCache / kPinBytes);
    check_equal(fake_cuda_count("pages_faulted_in"), 0U);
}

void pages_are_near_the_device() {
    const HostileDriver driver;
    Engine engine(kCache, {}, posix_file_ops(), driver.api);
    open_devices(engine, 1);
    check_equal(fake_cuda_count("near_pins"), fake_cuda_count("live_registrations"));
}

void between_pieces_the_lock_is_free_as_long_as_it_was_held() {
    const HostileDriver driver;
    check_equal(fake_cuda_be_hostile("pin_ns", 20'000), 0);  // 8 ms for each piece
    Engine engine(kCache, {}, posix_file_ops(), driver.api);
    open_devices(engine, 1);
    const auto inside = fake_cuda_count("pinning_us");
    const auto pieces = fake_cuda_count("live_registrations");
    check(pieces >= 8, "there are several pieces");
    // Between n of them there are n - 1 pauses.
    check(fake_cuda_count("between_pins_us") >= inside / pieces * (pieces - 1) * 9 / 10);
}

void what_is_waited_for_is_pinned_first() {
    const FakeDriver driver;
    const auto api = std::make_shared<HookedDeviceApi>(driver.api);
    api->pin_slowly(std::chrono::milliseconds(50));
    Engine engine(kCache, {}, posix_file_ops(), api);
    const Lease last = engine.cache().acquire(Share::kRestore, 0, engine.cache().epoch());
    check_ok(engine.devices().open(0));
    check_ok(engine.devices().pinner().wait(last.data(), kSegmentBytes));
    for (std::uint64_t at = 0; at < kSegmentBytes; at += kMiB) {
        check_equal(fake_cuda_is_registered(last.data() + at, kMiB), 1);
    }
    // What was in hand then, what is waited for, and what may have come since.
    check(engine.devices().pinner().pinned_bytes() <= 3 * kPinBytes);
    check(engine.devices().pinner().pinned_bytes() < kCache);
}

void a_bounded_number_of_copies_is_outstanding() {
    const TemporaryDirectory directory;
    const HostileDriver driver;
    const Pieces pieces(kManyCopies);
    Engine engine(kCache, {}, posix_file_ops(), driver.api);
    open_devices(engine, 1);
    const SaveFile file(directory.file("f"), pieces.nbytes, pieces.transfer);
    const StreamHandle training = training_stream(0);
    std::shared_ptr<DeviceEvent> fence;
    check_ok(engine.devices().find(0)->record(training, fence));
    check_durable(*engine.save({file}, {}, 0, open_window(), {fence}));
    check(fake_cuda_count("copies") >= kManyCopies);
    const auto most = fake_cuda_count("most_commands");
    check(most >= DeviceLane::kMostOutstanding / 2, "they are many");
    constexpr std::uint64_t kEventsAndFences = 8;
    check(most <= DeviceLane::kMostOutstanding + kEventsAndFences, std::to_string(most));
}

void a_stream_waits_once_for_the_fences_of_a_job() {
    const TemporaryDirectory directory;
    const HostileDriver driver;
    const Layout layout(5 * kSegmentBytes, 2, kMiB, 1);
    const Tensors tensors(layout);
    const Training training(2);
    Engine engine(kCache, {}, posix_file_ops(), driver.api);
    open_devices(engine, 2);
    const std::string path = directory.file("f");
    check_durable(
        *engine.save({tensors.save_file(path)}, {}, 0, open_window(), training.fences(engine)));
    check_equal(fake_cuda_count("cuStreamWaitEvent"), 2U);
    check_restored(*engine.restore({tensors.restore_file(path)}, training.fences(engine)));
    check_equal(fake_cuda_count("cuStreamWaitEvent"), 4U);
}

void after_a_sticky_error_each_event_is_asked_once() {
    const HostileDriver driver;
    constexpr std::uint64_t kCalls = DeviceLane::kMostOutstanding;
    const Pieces pieces(kCalls);
    Engine engine(kCache, {}, posix_file_ops(), driver.api);
    open_devices(engine, 1);
    const auto device = engine.devices().find(0);
    Lease host = engine.cache().acquire(Share::kSave, 0, engine.cache().epoch());
    const auto copies = copies_of(pieces, host.data());
    const Patience patience(std::chrono::seconds(10));
    DeviceLane lane(device, Direction::kGather, patience);
    JobFences none({});
    std::atomic<std::uint64_t> ended = 0;
    std::atomic<std::uint64_t> failed = 0;
    std::uint64_t asked = 0;
    {
        const Stall stall;
        for (const DeviceCopy& each : copies) {
            lane.copy(
                {&each, 1}, none, [](const auto&) {},
                [&](const DeviceLane::Outcome& outcome) {
                    failed += outcome.fault && outcome.finished ? 1U : 0U;
                    ++ended;
                });
        }
        asked = fake_cuda_count("cuCtxPushCurrent_v2");
        fake_cuda_poison(700);
    }
    wait_until("they end", [&] { return ended == kCalls; });
    check_equal(failed.load(), kCalls);
    asked = fake_cuda_count("cuCtxPushCurrent_v2") - asked;
    // Each call of the driver fails, the first of each question too; and an event is destroyed.
    check(asked < 4 * kCalls, "asked " + std::to_string(asked) + " times");
    lane.shutdown();
}

void at_the_end_of_the_process_nothing_waits_for_a_hanging_device() {
    const HostileDriver driver;
    const StreamHandle training = training_stream(0);
    auto engine = std::make_unique<Engine>(kCache, ThreadCounts{}, posix_file_ops(), driver.api);
    open_devices(*engine, 1);
    std::byte value{7};
    std::byte* const target = device_memory(0, 1).data();
    const Stall stall;
    check_equal(fake_cuda_write(0, training, target, &value, 1), 0);
    engine->cache().keep();
    engine->shutdown();
    engine.reset();
    check_equal(fake_cuda_count("cuMemHostUnregister"), 0U);
    check(fake_cuda_count("live_registrations") > 0);
}

void training_waits_for_no_copy() {
    const TemporaryDirectory directory;
    const HostileDriver driver;
    const Pieces pieces(kManyCopies);
    Engine engine(kCache, {}, posix_file_ops(), driver.api);
    open_devices(engine, 1);
    const StreamHandle training = training_stream(0);
    std::byte value{7};
    std::byte* const target = device_memory(0, 1).data();
    const SaveFile file(directory.file("f"), pieces.nbytes, pieces.transfer);
    std::shared_ptr<SaveHandle> save;
    {
        const Stall stall;  // the copies wait in the queue
        save = engine.save({file}, {}, 0, open_window());
        wait_until("there are copies",
                   [&] { return fake_cuda_count("copies") >= DeviceLane::kMostOutstanding; });
        // As many launches as the queue takes beside what the engine may have there.
        for (int n = 0; n < 800; ++n) {
            check_equal(fake_cuda_write(0, training, target, &value, 1), 0);
        }
    }
    check_durable(*save);
    check_equal(fake_cuda_synchronize_all(60), 0);
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases({
        {"ways_to_be_hostile_are_known", ways_to_be_hostile_are_known},
        {"a_full_queue_keeps_training_waiting", a_full_queue_keeps_training_waiting},
        {"an_event_may_be_told_late", an_event_may_be_told_late},
        {"pages_are_faulted_in_before_they_are_pinned",
         pages_are_faulted_in_before_they_are_pinned},
        {"pages_are_near_the_device", pages_are_near_the_device},
        {"between_pieces_the_lock_is_free_as_long_as_it_was_held",
         between_pieces_the_lock_is_free_as_long_as_it_was_held},
        {"what_is_waited_for_is_pinned_first", what_is_waited_for_is_pinned_first},
        {"a_bounded_number_of_copies_is_outstanding", a_bounded_number_of_copies_is_outstanding},
        {"a_stream_waits_once_for_the_fences_of_a_job",
         a_stream_waits_once_for_the_fences_of_a_job},
        {"after_a_sticky_error_each_event_is_asked_once",
         after_a_sticky_error_each_event_is_asked_once},
        {"at_the_end_of_the_process_nothing_waits_for_a_hanging_device",
         at_the_end_of_the_process_nothing_waits_for_a_hanging_device},
        {"training_waits_for_no_copy", training_waits_for_no_copy},
    });
}
