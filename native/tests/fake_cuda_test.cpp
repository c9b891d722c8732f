// What the fake CUDA driver promises, which is what CUDA does; and that it promises no more: what
// is left to chance goes both ways.

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <set>
#include <span>
#include <thread>
#include <vector>

#include "check.h"
#include "device_support.h"
#include "support.h"

namespace datastates::testing {
namespace {

constexpr std::uint64_t kSeeds = 200;  // enough for what is left to chance

Bytes filled(std::uint64_t nbytes, int value) {
    Bytes bytes(nbytes);
    std::ranges::fill(bytes, static_cast<std::byte>(value));
    return bytes;
}

/// The training process writes `bytes` in the order of `stream`.
void write(int device, StreamHandle stream, std::span<std::byte> to, const Bytes& bytes) {
    check_equal(fake_cuda_write(device, stream, to.data(), bytes.data(), bytes.size()), 0);
}

std::span<std::byte> zeroed(int device, std::uint64_t nbytes) {
    const auto memory = device_memory(device, nbytes);
    std::ranges::fill(memory, std::byte{0});
    return memory;
}

void a_stream_keeps_its_order() {
    const FakeDriver driver;
    Entered entered(*driver.api, 0);
    const StreamHandle stream = entered.stream();
    const auto memory = zeroed(0, 8);
    constexpr int kWrites = 50;
    PinnedMemory pinned(*driver.api, kWrites * 8);
    for (int n = 0; n < kWrites; ++n) {
        write(0, stream, memory, filled(8, n));
        check_ok(entered.copy(Direction::kGather, pinned.data() + std::ptrdiff_t{8} * n,
                              memory.data(), 8, stream));
    }
    check_equal(fake_cuda_synchronize(0, stream, 60), 0);
    for (std::size_t at = 0; at < pinned.bytes().size(); ++at) {
        check_equal(static_cast<std::size_t>(pinned.bytes()[at]), at / 8);
    }
}

/// What a copy in a stream of the engine reads of what the training process writes.
Bytes copied_during_a_write(std::uint64_t seed, bool ordered) {
    const FakeDriver driver(seed);
    fake_cuda_configure(0, 0, 0, 64);
    DeviceApi& api = *driver.api;
    Entered entered(api, 0);
    const StreamHandle training = training_stream(0);
    const StreamHandle own = entered.stream();
    const auto memory = zeroed(0, 256);
    PinnedMemory pinned(api, 256);
    write(0, training, memory, filled(256, 1));
    if (ordered) {
        const EventHandle event = entered.event();
        check_ok(api.record(event, training));
        check_ok(api.stream_wait(own, event));
        api.destroy_event(event);  // the wait goes on
    }
    check_ok(entered.copy(Direction::kGather, pinned.data(), memory.data(), 256, own));
    check_equal(fake_cuda_synchronize_all(60), 0);
    return pinned.bytes();
}

void streams_keep_no_order_without_an_event() {
    bool before = false;
    bool after = false;
    bool torn = false;
    for (std::uint64_t seed = 1; seed <= kSeeds && !(before && after && torn); ++seed) {
        const Bytes seen = copied_during_a_write(seed, false);
        const auto ones = std::ranges::count(seen, std::byte{1});
        before = before || ones == 0;
        after = after || ones == 256;
        torn = torn || (ones > 0 && ones < 256);
    }
    check(before && after && torn, "two streams are never at odds");
}

void an_event_orders_streams() {
    for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
        check(copied_during_a_write(seed, true) == filled(256, 1), "the event was not waited for");
    }
}

void a_wait_is_for_what_was_recorded_when_it_was_asked_for() {
    const FakeDriver driver;
    Entered entered(*driver.api, 0);
    const StreamHandle training = training_stream(0);
    const StreamHandle own = entered.stream();
    const EventHandle event = entered.event();
    check(entered.is_done(event), "an event never recorded is done");
    check_ok(driver.api->stream_wait(own, event));
    check_equal(fake_cuda_synchronize(0, own, 60), 0);

    check_ok(driver.api->record(event, training));
    check_ok(driver.api->stream_wait(own, event));
    Gate gate;
    gate.close(0, training);
    check_ok(driver.api->record(event, training));  // again, for later
    check_equal(fake_cuda_synchronize(0, own, 60), 0);
    check(!entered.is_done(event));

    check_ok(driver.api->stream_wait(own, event));
    check_equal(fake_cuda_synchronize(0, own, 0.05), 600);
    gate.open();
    check_equal(fake_cuda_synchronize(0, own, 60), 0);
    check(entered.is_done(event));
}

/// True if a stream's work follows, and is followed by, that of the legacy default stream.
bool keeps_order_with_legacy(StreamHandle stream) {
    bool kept = true;
    for (const bool legacy_first : {true, false}) {
        Gate gate;
        const StreamHandle first = legacy_first ? 0 : stream;
        const StreamHandle second = legacy_first ? stream : 0;
        gate.close(0, first);
        write(0, second, zeroed(0, 8), filled(8, 1));
        kept = kept && fake_cuda_synchronize(0, second, 0.05) == 600;
        gate.open();
        check_equal(fake_cuda_synchronize_all(60), 0);
    }
    return kept;
}

void the_legacy_stream_keeps_order_with_blocking_streams_only() {
    const FakeDriver driver;
    Entered entered(*driver.api, 0);
    check(keeps_order_with_legacy(training_stream(0, true)));
    check(!keeps_order_with_legacy(training_stream(0, false)));
    check(!keeps_order_with_legacy(entered.stream()), "the engine's streams wait for no other");
    Gate gate;  // another device's
    gate.close(0, 0);
    const StreamHandle other = training_stream(1, true);
    write(1, other, zeroed(1, 8), filled(8, 1));
    check_equal(fake_cuda_synchronize(1, other, 60), 0);
}

void pinned_memory_is_read_when_the_copy_runs() {
    const FakeDriver driver;
    Entered entered(*driver.api, 0);
    const StreamHandle stream = entered.stream();
    const auto memory = zeroed(0, 8);
    PinnedMemory pinned(*driver.api, 8);
    fake_cuda_stall(1);
    check_ok(entered.copy(Direction::kScatter, memory.data(), pinned.data(), 8, stream));
    std::ranges::fill(std::span(pinned.data(), 8), std::byte{9});  // too early
    fake_cuda_stall(0);
    check_equal(fake_cuda_synchronize(0, stream, 60), 0);
    check(std::ranges::equal(memory, filled(8, 9)));
    check_equal(fake_cuda_count("pageable_copies"), 0U);
}

void other_memory_is_copied_while_the_caller_waits() {
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        const FakeDriver driver(seed);
        Entered entered(*driver.api, 0);
        const auto memory = zeroed(0, 8);
        Bytes pageable = filled(8, 5);
        const StreamHandle stream = entered.stream();
        check_ok(entered.copy(Direction::kScatter, memory.data(), pageable.data(), 8, stream));
        check(std::ranges::equal(memory, pageable));
        std::ranges::fill(memory, std::byte{6});
        check_ok(entered.copy(Direction::kGather, pageable.data(), memory.data(), 8, stream));
        check(pageable == filled(8, 6));
        check_equal(fake_cuda_count("pageable_copies"), 2U);
    }
}

void memory_pinned_in_one_context_is_not_in_another() {
    const FakeDriver driver;
    void* const library = dlopen(FAKE_CUDA_LIBRARY, RTLD_NOW | RTLD_NOLOAD);
    using Register = int (*)(void*, std::size_t, unsigned);
    auto* const pin = reinterpret_cast<Register>(dlsym(library, "cuMemHostRegister_v2"));
    const Entered outer(*driver.api, 0);
    Bytes memory(8);
    check_equal(pin(memory.data(), 8, 0), 0);  // not portable
    Entered inner(*driver.api, 1);
    check_ok(
        inner.copy(Direction::kScatter, zeroed(1, 8).data(), memory.data(), 8, inner.stream()));
    check_equal(fake_cuda_count("pageable_copies"), 1U);
    driver.api->unregister_host(memory.data());
    dlclose(library);
}

void pointers_that_are_not_what_they_should_be_are_refused() {
    const FakeDriver driver;
    DeviceApi& api = *driver.api;
    Entered entered(api, 0);
    const StreamHandle stream = entered.stream();
    const auto mine = device_memory(0, 16);
    const auto others = device_memory(1, 16);
    Bytes host(16);
    const auto error_of = [&](std::byte* to, const std::byte* from, std::uint64_t nbytes) {
        const auto copied = entered.copy(Direction::kGather, to, from, nbytes, stream);
        return copied.ok() ? 0 : copied.fault().error;
    };
    check_equal(error_of(host.data(), host.data() + 8, 8), 1);
    check_equal(error_of(mine.data(), mine.data() + 8, 8), 1);
    check_equal(error_of(others.data(), mine.data(), 8), 1);
    check_equal(error_of(host.data(), others.data(), 8), 1);
    check_equal(error_of(host.data(), mine.data() + 8, 9), 1);
    check_ok(api.register_host(host.data(), 8));
    check_equal(error_of(host.data() + 4, mine.data(), 8), 1);  // pinned in part
    check_ok(api.register_host(host.data() + 8, 8));
    check_equal(error_of(host.data() + 4, mine.data(), 8), 1);  // pinned in two parts
    check_equal(fake_cuda_count("violations"), 7U);
    check_equal(error_of(host.data() + 8, mine.data() + 8, 8), 0);
    check_equal(fake_cuda_synchronize_all(60), 0);
    api.unregister_host(host.data());
    api.unregister_host(host.data() + 8);
}

void memory_of_the_caller_may_be_a_devices() {
    const FakeDriver driver;
    Entered entered(*driver.api, 0);
    const StreamHandle stream = entered.stream();
    PinnedMemory pinned(*driver.api, 16);
    Bytes tensor = filled(16, 4);
    check_equal(fake_cuda_adopt(0, tensor.data(), 8), 0);
    check_equal(fake_cuda_adopt(0, tensor.data() + 8, 8), 0);
    check_equal(fake_cuda_adopt(0, tensor.data() + 8, 4), 0);
    check_ok(entered.copy(Direction::kGather, pinned.data(), tensor.data(), 16, stream));
    check_equal(fake_cuda_synchronize(0, stream, 60), 0);
    check(pinned.bytes() == tensor);
    check_equal(fake_cuda_disown(tensor.data()), 0);
    check_equal(fake_cuda_disown(tensor.data()), 1);
    check_error(entered.copy(Direction::kGather, pinned.data(), tensor.data(), 16, stream), 1);
}

void memory_unpinned_too_early_is_noticed() {
    const FakeDriver driver;
    Entered entered(*driver.api, 0);
    const auto memory = zeroed(0, 8);
    const StreamHandle stream = entered.stream();
    PinnedMemory pinned(*driver.api, 8);
    check_ok(entered.copy(Direction::kGather, pinned.data(), memory.data(), 8, stream));
    check_equal(fake_cuda_synchronize(0, stream, 60), 0);
    driver.api->unregister_host(pinned.data());
    check_equal(fake_cuda_count("early_unregistrations"), 0U);
    check_ok(driver.api->register_host(pinned.data(), 8));
    fake_cuda_stall(1);
    check_ok(entered.copy(Direction::kGather, pinned.data(), memory.data(), 8, stream));
    driver.api->unregister_host(pinned.data());
    check_equal(fake_cuda_count("early_unregistrations"), 1U);
    fake_cuda_stall(0);
    check_equal(fake_cuda_synchronize(0, stream, 60), 0);
}

void a_stalled_device_is_at_rest_and_can_be_reset() {
    const FakeDriver driver;
    const auto memory = zeroed(0, 8);
    Bytes pageable(8);
    std::atomic<int> result = -1;
    std::jthread waits;
    {
        const StreamHandle stream = training_stream(0);
        fake_cuda_stall(1);
        waits = std::jthread([&] {
            check_ok(driver.api->retain(0));
            check_ok(driver.api->enter(0));
            const DeviceCopy copy{.to = pageable.data(), .from = memory.data(), .nbytes = 8};
            const auto copied = driver.api->copy(Direction::kGather, {&copy, 1}, stream);
            result = copied.ok() ? 0 : copied.fault().error;
        });
        while (fake_cuda_count("pending") == 0) std::this_thread::yield();
        check_equal(fake_cuda_synchronize_all(0.05), 600);
        check_equal(result.load(), -1);
    }
    fake_cuda_reset();
    waits.join();
    check_equal(result.load(), 4);
    check_equal(fake_cuda_count("pending"), 0U);
    check_equal(fake_cuda_context_references(0), 0);
}

void handles_of_before_a_reset_are_invalid() {
    const FakeDriver driver;
    const StreamHandle stale = training_stream(0);
    fake_cuda_reset();
    training_stream(0);
    Entered entered(*driver.api, 0);
    check_error(driver.api->record(entered.event(), stale), 400);
}

void what_an_error_drops_has_no_effect() {
    const FakeDriver driver;
    const StreamHandle stream = training_stream(0);
    const auto memory = zeroed(0, 8);
    fake_cuda_stall(1);
    write(0, stream, memory, filled(8, 1));
    fake_cuda_poison(700);
    check_equal(fake_cuda_write(0, stream, memory.data(), memory.data(), 8), 700);
    fake_cuda_stall(0);
    check_equal(fake_cuda_synchronize_all(60), 700);
    check(std::ranges::equal(memory, filled(8, 0)));
    fake_cuda_poison(0);
}

void failures_come_when_they_are_asked_for() {
    const FakeDriver driver;
    Entered entered(*driver.api, 0);
    check_equal(fake_cuda_fail_next("cuEventCreate", 2, 1), 0);
    check_equal(fake_cuda_fail_next("cuEventCreate", 3, 0), 0);
    check_equal(fake_cuda_fail_next("cuEventKreate", 2, 0), 500);
    check(fake_cuda_count("cuEventKreate") == UINT64_MAX);
    check_ok(driver.api->create_event());
    check_error(driver.api->create_event(), 2);
    check_error(driver.api->create_event(), 3);
    check_ok(driver.api->create_event());
    check_equal(fake_cuda_count("cuEventCreate"), 4U);
    check_equal(fake_cuda_count("live_events"), 2U);
}

void a_stream_that_waits_for_captured_work_joins_the_capture() {
    const FakeDriver driver;
    DeviceApi& api = *driver.api;
    Entered entered(api, 0);
    const StreamHandle training = training_stream(0);
    const StreamHandle own = entered.stream();
    const EventHandle event = entered.event();
    const auto memory = zeroed(0, 8);
    check_equal(fake_cuda_begin_capture(0, training, 2), 0);
    write(0, training, memory, filled(8, 1));
    check_ok(api.record(event, training));
    check_error(api.is_done(event), 907);
    check_ok(api.stream_wait(own, event));
    check_equal(fake_cuda_end_capture(0, training), 904);  // the other has joined
    check_equal(fake_cuda_synchronize_all(60), 0);
    check(std::ranges::equal(memory, filled(8, 0)), "what is captured does not run");
    check_equal(fake_cuda_count("captured"), 2U);

    check_equal(fake_cuda_begin_capture(0, training, 2), 0);
    check_ok(api.record(event, training));
    check_ok(api.stream_wait(own, event));
    check_ok(api.record(event, own));
    check_ok(api.stream_wait(training, event));
    check_equal(fake_cuda_end_capture(0, training), 0);
}

void a_capture_does_not_follow_what_is_outside() {
    const FakeDriver driver;
    Entered entered(*driver.api, 0);
    const StreamHandle training = training_stream(0, true);
    const EventHandle event = entered.event();
    check_ok(driver.api->record(event, entered.stream()));
    check_equal(fake_cuda_begin_capture(0, training, 0), 0);
    check_error(driver.api->stream_wait(training, event), 905);
    check_equal(fake_cuda_end_capture(0, training), 901);
    check_equal(fake_cuda_begin_capture(0, training, 0), 0);
    check_error(driver.api->record(event, 0), 906);
    check_equal(fake_cuda_end_capture(0, training), 901);
}

void a_fork_has_no_driver() {
    const FakeDriver driver;
    training_stream(0);
    check_equal(fake_cuda_synchronize_all(60), 0);
    const pid_t child = ::fork();
    if (child == 0) {
        const auto count = driver.api->device_count();
        ::_exit(!count.ok() && count.fault().error == 3 ? 0 : 1);
    }
    int status = -1;
    check(::waitpid(child, &status, 0) == child && status == 0, "the child had a driver");
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<
        a_stream_keeps_its_order, streams_keep_no_order_without_an_event, an_event_orders_streams,
        a_wait_is_for_what_was_recorded_when_it_was_asked_for,
        the_legacy_stream_keeps_order_with_blocking_streams_only,
        pinned_memory_is_read_when_the_copy_runs, other_memory_is_copied_while_the_caller_waits,
        memory_pinned_in_one_context_is_not_in_another,
        pointers_that_are_not_what_they_should_be_are_refused,
        memory_of_the_caller_may_be_a_devices, memory_unpinned_too_early_is_noticed,
        a_stalled_device_is_at_rest_and_can_be_reset, handles_of_before_a_reset_are_invalid,
        what_an_error_drops_has_no_effect, failures_come_when_they_are_asked_for,
        a_stream_that_waits_for_captured_work_joins_the_capture,
        a_capture_does_not_follow_what_is_outside, a_fork_has_no_driver>();
}
