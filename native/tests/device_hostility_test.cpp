// A driver as bad as real ones are: what training loses to a save, and how a save ends.

#include <atomic>
#include <fstream>
#include <latch>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "device_stream.h"
#include "hooked_device_api.h"

namespace datastates::testing {
namespace {

constexpr std::uint64_t kCache = 16 * kSegmentBytes;
/// Copies that are outstanding at a time, at most.
constexpr std::uint64_t kMostOutstanding = DeviceLane::kMostParts * DeviceLane::kMostCopies;
constexpr std::uint64_t kManyCopies = 4 * kMostOutstanding;

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

/// One tensor of device 0.
struct LargeTensor {
    explicit LargeTensor(std::uint64_t nbytes) : memory(device_memory(0, nbytes)) {
        transfer.add(0, nbytes, memory.data(), 0, Access::kReadWrite, 0);
    }
    [[nodiscard]] SaveFile save_file(const std::string& path) const {
        return {path, memory.size(), transfer};
    }

    std::span<std::byte> memory;
    Transfer transfer;
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
    for (const char* const way :
         {"lock", "queue", "drain", "pin_ns", "lie_us", "context", "engines", "all"}) {
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
        std::latch begun(1);
        std::jthread late([&] {
            begun.count_down();
            check_equal(fake_cuda_write(0, training, target, &value, 1), 0);
        });
        begun.wait();
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
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

void a_node_that_cannot_be_preferred_is_told_of() {
    const HostileDriver driver;
    fake_cuda_set_attribute(134, 62);  // which no test machine has
    Engine engine(kCache, {}, posix_file_ops(), driver.api);
    open_devices(engine, 1);
    const auto fault = engine.devices().pinner().node_fault();
    check(fault && describe(*fault).find("set_mempolicy for NUMA node 62") != std::string::npos);
    check(!engine.devices().pinner().fault(), "it is pinned all the same");
    check(engine.devices().pinner().pinned_bytes() >= kCache);
}

void a_cache_that_is_pinned_half_way_serves_saves() {
    const TemporaryDirectory directory;
    const HostileDriver driver;
    const LargeTensor tensor(12 * kSegmentBytes);
    fake_cuda_fail_next("cuMemHostRegister_v2", 2, 3);
    Engine engine(kCache, {}, posix_file_ops(), driver.api);
    check_ok(engine.devices().open(0));
    wait_until("it gives up", [&] { return engine.devices().pinner().idle(); });
    check(engine.devices().pinner().fault().has_value());
    check(engine.devices().pinner().pinned_bytes() < kCache);
    check_durable(*engine.save({tensor.save_file(directory.file("f"))}, {}, 0, open_window()));
    check_equal(fake_cuda_count("violations"), 0U);
}

void events_are_used_again() {
    const TemporaryDirectory directory;
    const HostileDriver driver;
    const Pieces pieces(kManyCopies);
    Engine engine(kCache, {}, posix_file_ops(), driver.api);
    open_devices(engine, 1);
    for (std::uint64_t order = 0; order < 6; ++order) {
        const std::string path = directory.file(std::to_string(order));
        const SaveFile file(path, pieces.nbytes, pieces.transfer);
        check_durable(*engine.save({file}, {}, order, open_window()));
    }
    check(fake_cuda_count("cuEventRecord") >= 6 * kManyCopies / kMostOutstanding);
    check(fake_cuda_count("cuEventCreate") <= 8);
    check_equal(fake_cuda_count("cuEventDestroy_v2"), 0U);
}

void a_copy_engine_finishes_a_stream_first() {
    const FakeDriver driver(3, 2000);
    check_equal(fake_cuda_be_hostile("engines", 1), 0);
    constexpr std::uint64_t kEach = 16;
    const auto device = device_memory(0, 2 * kEach);
    Entered entered(*driver.api, 0);
    PinnedMemory pinned(*driver.api, 2 * kEach);
    for (std::uint64_t n = 0; n < 2 * kEach; ++n) device[n] = std::byte{1};
    const StreamHandle streams[] = {entered.stream(), entered.stream()};
    {
        const Stall stall;
        for (std::uint64_t n = 0; n < 2 * kEach; ++n) {
            check_ok(entered.copy(Direction::kGather, pinned.data() + n, device.data() + n, 1,
                                  streams[n / kEach]));
        }
    }
    const volatile std::byte* const copied = pinned.data();
    const auto done = [&](std::uint64_t n) { return copied[n] == std::byte{1}; };
    wait_until("they are done", [&] {
        const bool both_begun = done(0) && done(kEach);
        const bool first = done(kEach - 1);
        const bool second = done(2 * kEach - 1);
        check(first || second || !both_begun, "one after the other");
        return first && second;
    });
    check_equal(fake_cuda_synchronize_all(60), 0);
}

/// `loss.item()` is such a copy.
void a_copy_of_training_passes_those_of_a_save() {
    const HostileDriver driver;
    constexpr int kCalls = 32;
    const LargeTensor tensor(kSegmentBytes);
    Engine engine(kCache, {}, posix_file_ops(), driver.api);
    open_devices(engine, 1);
    const Lease host = engine.cache().acquire(Share::kSave, 0, engine.cache().epoch());
    const DeviceCopy copy{.to = host.data(), .from = tensor.memory.data(), .nbytes = kSegmentBytes};
    JobFences none({});
    const Patience patience(std::chrono::seconds(10));
    DeviceLane lane(engine.devices().find(0), Direction::kGather, patience);
    std::atomic<int> ended = 0;
    std::jthread saving([&] {
        for (int n = 0; n < kCalls; ++n) {
            lane.copy({&copy, 1}, none, [](const auto&) {}, [&](const auto&) { ++ended; });
        }
    });
    wait_until("copies are made", [&] { return ended > 0; });
    Entered entered(*driver.api, 0);
    PinnedMemory pinned(*driver.api, 8);
    const StreamHandle training = entered.stream();
    check_ok(entered.copy(Direction::kGather, pinned.data(), tensor.memory.data(), 8, training));
    check_equal(fake_cuda_synchronize(0, training, 60), 0);
    check(ended < kCalls / 2, std::to_string(ended) + " of " + std::to_string(kCalls));
    saving.join();
    lane.shutdown();
    check_equal(ended.load(), kCalls);
}

/// The other stream's copies may be done although these came first.
void a_part_that_hangs_keeps_the_memory_of_its_call() {
    const HostileDriver driver;
    const Pieces pieces(DeviceLane::kMostParts * DeviceLane::kMostCopies);
    Engine engine(kCache, {}, posix_file_ops(), driver.api);
    open_devices(engine, 1);
    const auto device = engine.devices().find(0);
    const Lease host = engine.cache().acquire(Share::kSave, 0, engine.cache().epoch());
    Patience patience(std::chrono::milliseconds(500));
    DeviceLane lane(device, Direction::kGather, patience);
    JobFences none({});
    bool finished = true;
    Gate gate;
    gate.close(0, device->streams(Direction::kGather).front());
    lane.copy(
        copies_of(pieces, host.data()), none, [](const auto&) {},
        [&](const CopyOutcome& outcome) { finished = outcome.finished; });
    check_equal(fake_cuda_synchronize(0, device->streams(Direction::kGather).back(), 60), 0);
    patience.begin();
    lane.shutdown();
    check(!finished);
    gate.open();
    check_equal(fake_cuda_synchronize_all(60), 0);
}

void between_pieces_the_lock_is_free_as_long_as_it_was_held() {
    const HostileDriver driver;
    check_equal(fake_cuda_be_hostile("pin_ns", 20'000), 0);  // 8 ms for each piece
    Engine engine(kCache, {}, posix_file_ops(), driver.api);
    open_devices(engine, 1);
    check(fake_cuda_count("live_registrations") >= 8, "there are several pieces");
    check_equal(fake_cuda_count("hasty_pins"), 0U);
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
    const auto fence = value_of(engine.devices().find(0)->record(training));
    check_durable(*engine.save({file}, {}, 0, open_window(), {fence}));
    check(fake_cuda_count("copies") >= kManyCopies);
    const auto most = fake_cuda_count("most_commands");
    check(most >= kMostOutstanding / 2, "they are many");
    constexpr std::uint64_t kEventsAndFences = 8;
    check(most <= kMostOutstanding + kEventsAndFences, std::to_string(most));
}

/// What is outstanding is what a small copy of training's may have to wait for.
void a_bounded_number_of_bytes_is_outstanding() {
    constexpr std::uint64_t kMostBytes = DeviceLane::kMostParts * kSegmentBytes;
    const TemporaryDirectory directory;
    const HostileDriver driver;
    const LargeTensor tensor(12 * kSegmentBytes);
    Engine engine(kCache, {}, posix_file_ops(), driver.api);
    open_devices(engine, 1);
    std::shared_ptr<SaveHandle> save;
    {
        const Stall stall;
        save = engine.save({tensor.save_file(directory.file("f"))}, {}, 0, open_window());
        wait_until("there are copies", [] { return fake_cuda_count("most_bytes") >= kMostBytes; });
    }
    check_durable(*save);
    check_equal(fake_cuda_count("most_bytes"), kMostBytes);
}

void saves_copy_no_faster_than_they_may() {
    const TemporaryDirectory directory;
    const HostileDriver driver;
    const LargeTensor tensor(4 * kSegmentBytes);
    constexpr std::uint64_t kRate = std::uint64_t{128} << 20U;
    Engine engine(kCache, {}, posix_file_ops(), driver.api, Patience::kDefault,
                  {.copy_rate = kRate});
    open_devices(engine, 1);
    const auto began = Clock::now();
    check_durable(*engine.save({tensor.save_file(directory.file("f"))}, {}, 0, open_window()));
    // The first part may go at once.
    check(Clock::now() - began >= std::chrono::duration<double>(3.0 * kSegmentBytes / kRate));
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
    check_equal(fake_cuda_count("cuStreamWaitEvent"), 4U);  // by two streams of each device
    check_restored(*engine.restore({tensors.restore_file(path)}, training.fences(engine)));
    check_equal(fake_cuda_count("cuStreamWaitEvent"), 8U);
}

void after_a_sticky_error_each_event_is_asked_once() {
    const HostileDriver driver;
    constexpr std::uint64_t kCalls = DeviceLane::kMostParts;
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
                [&](const CopyOutcome& outcome) {
                    failed += !outcome.status.ok() && outcome.finished ? 1U : 0U;
                    ++ended;
                });
        }
        asked = fake_cuda_count("cuEventQuery");
        fake_cuda_poison(700);
    }
    wait_until("they end", [&] { return ended == kCalls; });
    check_equal(failed.load(), kCalls);
    asked = fake_cuda_count("cuEventQuery") - asked;
    check(asked < kCalls + 16, "asked " + std::to_string(asked) + " times");
    lane.shutdown();
}

void an_error_that_passes_is_not_the_end_of_a_device() {
    const HostileDriver driver;
    std::atomic<int> failing = 8;  // so often it is asked before the error counts as one that stays
    const auto api = std::make_shared<HookedDeviceApi>(driver.api, [&](std::string_view call) {
        if (call != "is_done" || failing-- <= 0) return std::optional<Fault>();
        return std::optional(Fault{
            .kind = FaultKind::kDevice, .error = 2, .path = {}, .operation = {}, .detail = {}});
    });
    const auto device = value_of(Device::open(api, 0));
    const auto event = value_of(device->record(device->streams(Direction::kGather).front()));
    const auto never = [] { return false; };
    check(!event->wait_idle(never).status.ok() && device->dead());
    check_ok(event->wait_idle(never).status);
    check(!device->dead());
}

void a_hanging_device_is_given_no_more_copies() {
    const TemporaryDirectory directory;
    const HostileDriver driver;
    const Pieces pieces(4096);
    Engine engine(kCache, {}, posix_file_ops(), driver.api, std::chrono::milliseconds(300));
    open_devices(engine, 1);
    const Stall stall;
    const SaveFile file(directory.file("f"), pieces.nbytes, pieces.transfer);
    const auto save = engine.save({file}, {}, 0, open_window());
    wait_until("there are copies", [&] { return fake_cuda_count("copies") >= kMostOutstanding; });
    engine.shutdown();
    check((*save)->wait(Clock::now()));
    check((*save)->fault()->kind == FaultKind::kShutdown);
    check_equal(fake_cuda_count("copies"), kMostOutstanding);
}

void fences_are_waited_for_although_the_first_wait_fails() {
    const HostileDriver driver;
    const Pieces pieces(2);
    Engine engine(kCache, {}, posix_file_ops(), driver.api);
    open_devices(engine, 1);
    const auto device = engine.devices().find(0);
    const Lease host = engine.cache().acquire(Share::kSave, 0, engine.cache().epoch());
    const auto copies = copies_of(pieces, host.data());
    const auto fence = value_of(device->record(training_stream(0)));
    JobFences fences({fence});
    const Patience patience(std::chrono::seconds(10));
    DeviceLane lane(device, Direction::kGather, patience);
    fake_cuda_fail_next("cuStreamWaitEvent", 2, 0);
    std::atomic<int> failed = 0;
    std::atomic<int> ended = 0;
    for (const DeviceCopy& each : copies) {
        lane.copy(
            {&each, 1}, fences, [](const auto&) {},
            [&](const CopyOutcome& outcome) {
                failed += outcome.status.ok() ? 0 : 1;
                ++ended;
            });
    }
    wait_until("they end", [&] { return ended == 2; });
    check_equal(failed.load(), 1);
    check_equal(fake_cuda_count("cuStreamWaitEvent"), 3U);  // the second time by two streams
    lane.shutdown();
}

/// A shutdown joins the threads of devices: none may be in a `close` that never returns.
void files_are_closed_by_threads_that_a_shutdown_need_not_wait_for() {
    const TemporaryDirectory directory;
    const HostileDriver driver;
    std::mutex mutex;
    std::set<std::string> closers;  // threads' names, without their numbers
    const auto ops = std::make_shared<HookedFileOps>([&](const HookedFileOps::Event& event) {
        if (event.call == HookedFileOps::Call::kClose) {
            std::string name;
            std::ifstream("/proc/thread-self/comm") >> name;
            const std::scoped_lock lock(mutex);
            closers.insert(name.substr(0, name.rfind('-')));
        }
        return HookedFileOps::Instead();
    });
    const Layout layout(kSegmentBytes, 1, kMiB, 1);
    const Tensors tensors(layout);
    Engine engine(kCache, {}, ops, driver.api);
    open_devices(engine, 1);
    const std::string path = directory.file("f");
    check_durable(*engine.save({tensors.save_file(path)}, {}, 0, open_window()));
    check_restored(*engine.restore({tensors.restore_file(path)}));
    std::shared_ptr<SaveHandle> cancelled;
    const auto before = fake_cuda_count("copies");
    {
        const Stall stall;
        cancelled = engine.save({tensors.save_file(directory.file("g"))}, {}, 0, open_window());
        wait_until("there are copies", [&] { return fake_cuda_count("copies") > before; });
        cancelled->cancel();
    }
    check((*cancelled)->wait(in(60)));
    engine.shutdown();
    const std::scoped_lock lock(mutex);
    closers.erase("ds-place");  // if it was the last to let go of the restore
    closers.erase("ds-restore");
    check(closers == std::set<std::string>{"ds-flush"});
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
                   [&] { return fake_cuda_count("copies") >= kMostOutstanding; });
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
    return run_cases<
        ways_to_be_hostile_are_known, a_full_queue_keeps_training_waiting,
        an_event_may_be_told_late, pages_are_faulted_in_before_they_are_pinned,
        pages_are_near_the_device, a_node_that_cannot_be_preferred_is_told_of,
        a_cache_that_is_pinned_half_way_serves_saves, events_are_used_again,
        a_copy_engine_finishes_a_stream_first, a_copy_of_training_passes_those_of_a_save,
        a_part_that_hangs_keeps_the_memory_of_its_call,
        between_pieces_the_lock_is_free_as_long_as_it_was_held, what_is_waited_for_is_pinned_first,
        a_bounded_number_of_copies_is_outstanding, a_bounded_number_of_bytes_is_outstanding,
        saves_copy_no_faster_than_they_may, a_stream_waits_once_for_the_fences_of_a_job,
        after_a_sticky_error_each_event_is_asked_once,
        an_error_that_passes_is_not_the_end_of_a_device, a_hanging_device_is_given_no_more_copies,
        fences_are_waited_for_although_the_first_wait_fails,
        files_are_closed_by_threads_that_a_shutdown_need_not_wait_for,
        at_the_end_of_the_process_nothing_waits_for_a_hanging_device, training_waits_for_no_copy>();
}
