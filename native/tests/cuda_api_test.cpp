// CUDA as a DeviceApi: how its library is found, what it is asked, and what its answers become.

#include "device/cuda_api.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "check.h"
#include "device/cuda_abi.h"
#include "device_support.h"
#include "support.h"

namespace datastates::testing {
namespace {

bool says(const std::optional<Fault>& fault, std::string_view words) {
    return fault && describe(*fault).find(words) != std::string::npos;
}

std::optional<Fault> fault_of_opening(const std::string& library) {
    auto fault = fault_of(open_cuda(library));
    check(fault.has_value(), "it opened");
    check(fault->kind == FaultKind::kDevice);
    return fault;
}

void a_missing_library_is_a_fault_that_names_it() {
    const auto fault = fault_of_opening("libno-such-driver.so.1");
    check(says(fault, "cannot open 'libno-such-driver.so.1': "), describe(*fault));
    check(says(fault, "No such file"), describe(*fault));
}

void a_library_that_is_no_driver_is_a_fault_that_says_so() {
    const auto fault = fault_of_opening("libm.so.6");
    check(says(fault, "'libm.so.6' is no CUDA driver: it has no cuInit, "), describe(*fault));
}

void what_a_driver_lacks_is_named() {
    const FakeDriver driver;
    fake_cuda_hide("cuMemcpyDtoHAsync");
    fake_cuda_hide("cuEventQuery");
    const auto fault = fault_of_opening(FAKE_CUDA_LIBRARY);
    check(says(fault, "drives only CUDA 13.0: it has no cuEventQuery, cuMemcpyDtoHAsync_v2"),
          describe(*fault));
}

void the_environment_names_the_library() {
    check_equal(::unsetenv("DCP_DATASTATES_CUDA_LIBRARY"), 0);
    check(cuda_library() == "libcuda.so.1");
    check_equal(::setenv("DCP_DATASTATES_CUDA_LIBRARY", "", 1), 0);
    check(cuda_library() == "libcuda.so.1");
    check_equal(::setenv("DCP_DATASTATES_CUDA_LIBRARY", "/opt/other.so", 1), 0);
    check(cuda_library() == "/opt/other.so");
    check_equal(::unsetenv("DCP_DATASTATES_CUDA_LIBRARY"), 0);
}

void opening_initializes_nothing() {
    const FakeDriver driver;
    check_equal(fake_cuda_count("cuInit"), 0U);
}

void devices_are_counted_without_a_context() {
    const FakeDriver driver;
    fake_cuda_configure(3, 0, 0, 0);
    check_equal(value_of(driver.api->device_count()), 3);
    for (int device = 0; device < 3; ++device) {
        check_equal(fake_cuda_contexts_created(device), 0U);
    }
    fake_cuda_configure(-1, 0, 0, 0);
    check_equal(value_of(driver.api->device_count()), 0);
    fake_cuda_fail_next("cuInit", 999, 0);
    check_error(driver.api->device_count(), 999);
}

void only_a_retained_device_has_a_context() {
    const FakeDriver driver;
    DeviceApi& api = *driver.api;
    check_ok(api.retain(1));
    check_ok(api.retain(1));
    check_equal(fake_cuda_context_references(1), 1);
    check_ok(api.enter(1));
    api.destroy_stream(value_of(api.create_stream()));
    api.leave();
    api.release(1);
    check_equal(fake_cuda_context_references(1), 1);
    api.release(1);
    api.release(1);  // once too often
    check_equal(fake_cuda_context_references(1), 0);
    check_equal(fake_cuda_contexts_created(1), 1U);
    check_equal(fake_cuda_contexts_created(0), 0U);
}

void the_context_of_the_training_process_is_shared() {
    const FakeDriver driver;
    training_stream(0);
    {
        const Entered entered(*driver.api, 0);
        check_equal(fake_cuda_context_references(0), 2);
    }
    check_equal(fake_cuda_context_references(0), 1);
    check_equal(fake_cuda_contexts_created(0), 1U);
}

void a_device_that_is_not_retained_is_not_entered() {
    const FakeDriver driver;
    const auto fault = fault_of(driver.api->enter(1));
    check_error(fault, 201);
    check(says(fault, "device 1 is not retained"), describe(*fault));
    check_error(driver.api->create_stream(), 3);  // not even initialized
    check_error(driver.api->retain(7), 101);
    check_ok(driver.api->retain(1));
    check_error(driver.api->create_stream(), 201);
    driver.api->release(1);
}

void contexts_nest() {
    const FakeDriver driver;
    Entered outer(*driver.api, 0);
    const StreamHandle stream = outer.stream();
    {
        Entered inner(*driver.api, 1);
        check_error(driver.api->record(inner.event(), stream), 201);
    }
    check_ok(driver.api->record(outer.event(), stream));
}

void what_is_created_is_destroyed() {
    const FakeDriver driver;
    Entered entered(*driver.api, 0);
    const StreamHandle stream = entered.stream();
    const EventHandle event = entered.event();
    {
        const PinnedMemory pinned(*driver.api, kMiB);
        check_equal(fake_cuda_is_registered(pinned.bytes().data() + 17, kMiB - 17), 1);
        check_equal(fake_cuda_count("live_registrations"), 1U);
    }
    check_equal(fake_cuda_count("live_streams"), 1U);
    check_equal(fake_cuda_count("live_events"), 1U);
    driver.api->destroy_stream(stream);
    driver.api->destroy_event(event);
    check_equal(fake_cuda_count("live_streams"), 0U);
    check_equal(fake_cuda_count("live_events"), 0U);
    check_equal(fake_cuda_count("live_registrations"), 0U);
}

void memory_that_others_have_registered_is_left_to_them() {
    const FakeDriver driver;
    const Entered entered(*driver.api, 0);
    Bytes memory(kMiB);
    fake_cuda_fail_next("cuMemHostRegister_v2", 712, 0);  // by another library
    check_ok(driver.api->register_host(memory.data(), kMiB));
    driver.api->unregister_host(memory.data());
    check_equal(fake_cuda_count("cuMemHostUnregister"), 0U);
    check_ok(driver.api->register_host(memory.data(), kMiB));
    driver.api->unregister_host(memory.data());
    check_equal(fake_cuda_count("cuMemHostUnregister"), 1U);
    fake_cuda_fail_next("cuMemHostRegister_v2", 2, 0);
    check_error(driver.api->register_host(memory.data(), kMiB), 2);
}

/// Bytes of a device in many places, and where they go.
struct Scattered {
    explicit Scattered(DeviceApi& api) : content(random_bytes(kMiB, 7)), pinned(api, kMiB) {
        std::ranges::copy(content, device.begin());
        for (std::uint64_t at = 0; at < kMiB; at += kPart) {
            gather.push_back(
                {.to = pinned.data() + at, .from = device.data() + at, .nbytes = kPart});
            scatter.push_back(
                {.to = other.data() + at, .from = pinned.data() + at, .nbytes = kPart});
        }
    }

    static constexpr std::uint64_t kPart = 100'000 / 8 * 8;
    Bytes content;
    std::span<std::byte> device = device_memory(0, kMiB + kPart).first(kMiB);
    std::span<std::byte> other = device_memory(0, kMiB + kPart).first(kMiB);
    PinnedMemory pinned;
    std::vector<DeviceCopy> gather;
    std::vector<DeviceCopy> scatter;
};

void check_there_and_back(const FakeDriver& driver, StreamHandle stream) {
    Entered entered(*driver.api, 0);
    Scattered all(*driver.api);
    // The last part ends where the memory does.
    all.gather.back().nbytes = all.scatter.back().nbytes = kMiB % Scattered::kPart;
    all.gather.push_back({.to = all.pinned.data(), .from = all.device.data(), .nbytes = 0});
    if (stream != 0) stream = entered.stream();
    const EventHandle event = entered.event();
    check_ok(driver.api->copy(Direction::kGather, all.gather, stream));
    check_ok(driver.api->copy(Direction::kScatter, all.scatter, stream));
    check_ok(driver.api->record(event, stream));
    entered.wait(event);
    check(all.pinned.bytes() == all.content, "gathered bytes");
    check(std::ranges::equal(all.other, all.content), "scattered bytes");
    check_equal(fake_cuda_count("bytes_to_host"), kMiB);
    check_equal(fake_cuda_count("bytes_to_device"), kMiB);
    check_equal(fake_cuda_count("copies"), all.scatter.size() * 2);
    check_equal(fake_cuda_count("pageable_copies"), 0U);
    check_equal(fake_cuda_count("violations"), 0U);
}

constexpr StreamHandle kOwnStream = 1;

void copies_go_there_and_back() {
    for (const StreamHandle stream : {StreamHandle{0}, kOwnStream}) {
        const FakeDriver driver;
        check_there_and_back(driver, stream);
    }
}

void nothing_to_copy_is_no_call() {
    const FakeDriver driver;
    Entered entered(*driver.api, 0);
    const std::vector<DeviceCopy> none(3);
    check_ok(driver.api->copy(Direction::kGather, none, entered.stream()));
    check_ok(driver.api->copy(Direction::kGather, {}, entered.stream()));
    check_equal(fake_cuda_count("copies"), 0U);
}

void faults_are_in_the_words_of_the_driver() {
    const FakeDriver driver;
    Entered entered(*driver.api, 0);
    Scattered all(*driver.api);
    fake_cuda_fail_next("cuMemcpyDtoHAsync_v2", 700, 1);
    const StreamHandle stream = entered.stream();
    const std::span<const DeviceCopy> one(all.gather.data(), 1);
    check_ok(driver.api->copy(Direction::kGather, one, stream));
    const auto fault = fault_of(driver.api->copy(Direction::kGather, one, stream));
    check_error(fault, 700);
    check(fault->operation == "cuMemcpyDtoHAsync_v2");
    check(fault->detail ==
          "CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was encountered");
    check_ok(driver.api->copy(Direction::kGather, one, stream));  // it was not sticky

    fake_cuda_fail_next("cuEventCreate", 12345, 0);
    const auto unnamed = fault_of(driver.api->create_event());
    check(says(unnamed, "error 12345, which the driver has no name for"), describe(*unnamed));
    entered.wait(entered.event());
    check_equal(fake_cuda_synchronize_all(60), 0);
}

void an_error_of_execution_fails_all_that_follows() {
    const FakeDriver driver;
    Entered entered(*driver.api, 0);
    const StreamHandle stream = entered.stream();
    const EventHandle event = entered.event();
    check_equal(
        fake_cuda_launch(0, training_stream(0), [](void*) { fake_cuda_poison(700); }, nullptr), 0);
    check_equal(fake_cuda_synchronize_all(60), 700);
    check_error(driver.api->is_done(event), 700);
    check_error(driver.api->record(event, stream), 700);
    check_error(driver.api->stream_wait(stream, event), 700);
    check_ok(driver.api->enter(0));  // that concerns the thread alone
    driver.api->leave();
    fake_cuda_poison(0);
}

void a_driver_that_is_gone_is_no_trouble() {
    const FakeDriver driver;
    DeviceApi& api = *driver.api;
    {
        Entered entered(api, 0);
        const StreamHandle stream = entered.stream();
        const EventHandle event = entered.event();
        const PinnedMemory pinned(api, kMiB);
        fake_cuda_poison(4);
        check_error(api.is_done(event), 4);
        api.destroy_event(event);
        api.destroy_stream(stream);
    }
    fake_cuda_poison(0);
}

void a_context_that_is_gone_is_no_trouble() {
    const FakeDriver driver;
    DeviceApi& api = *driver.api;
    Entered entered(api, 0);
    const StreamHandle stream = entered.stream();
    const EventHandle event = entered.event();
    api.release(0);  // that was the last reference
    check_error(api.record(event, stream), 709);
    api.destroy_event(event);
    api.destroy_stream(stream);
}

/// What fails there fails the case.
template <typename Body>
void in_another_thread(const Body& body) {
    std::async(std::launch::async, body).get();
}

void copy_something(DeviceApi& api) {
    Entered entered(api, 0);
    const Scattered all(api);
    const StreamHandle stream = entered.stream();
    const EventHandle event = entered.event();
    check_ok(api.copy(Direction::kGather, std::span(all.gather).first(1), stream));
    check_ok(api.record(event, stream));
    entered.wait(event);
    api.destroy_event(event);
    api.destroy_stream(stream);
}

void a_relaxed_thread_breaks_no_capture() {
    const FakeDriver driver;
    const StreamHandle captured = training_stream(0);
    check_equal(fake_cuda_begin_capture(0, captured, 0), 0);
    in_another_thread([&] {
        const Entered entered(*driver.api, 0);
        check_equal(value_of(driver.api->exchange_capture(kRelaxedCapture)), 0);
        copy_something(*driver.api);
        check_equal(value_of(driver.api->exchange_capture(0)), kRelaxedCapture);
    });
    check_equal(fake_cuda_capture_invalidated(0, captured), 0);
    check_equal(fake_cuda_end_capture(0, captured), 0);
}

void any_other_thread_breaks_a_capture() {
    const FakeDriver driver;
    Entered entered(*driver.api, 0);
    const EventHandle event = entered.event();
    const StreamHandle captured = training_stream(0);
    check_equal(fake_cuda_begin_capture(0, captured, 0), 0);
    in_another_thread([&] {
        Entered other(*driver.api, 0);
        check_error(driver.api->is_done(event), 900);
        Bytes memory(8);
        check_error(driver.api->register_host(memory.data(), 8), 900);
    });
    check_equal(fake_cuda_capture_invalidated(0, captured), 1);
    check_equal(fake_cuda_end_capture(0, captured), 901);
}

template <typename Function>
Function* control_of(void* library, const char* name) {
    auto* const found = reinterpret_cast<Function*>(dlsym(library, name));
    check(found != nullptr, name);
    return found;
}

void an_old_driver_is_asked_by_exported_names() {
    const auto api = value_of(open_cuda(OLD_FAKE_CUDA_LIBRARY));
    void* const library = dlopen(OLD_FAKE_CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    const auto count = control_of<decltype(fake_cuda_count)>(library, "fake_cuda_count");
    const auto alloc = control_of<decltype(fake_cuda_alloc)>(library, "fake_cuda_alloc");
    const auto reset = control_of<decltype(fake_cuda_reset)>(library, "fake_cuda_reset");
    {
        Entered entered(*api, 0);
        PinnedMemory pinned(*api, 8);
        auto* const device = static_cast<std::byte*>(alloc(0, 8));
        const std::vector<DeviceCopy> copies{
            {.to = pinned.data(), .from = device, .nbytes = 4},
            {.to = pinned.data() + 4, .from = device, .nbytes = 4}};
        const StreamHandle stream = entered.stream();
        const EventHandle event = entered.event();
        check_ok(api->copy(Direction::kGather, copies, stream));
        check_ok(api->record(event, stream));
        entered.wait(event);
        check(pinned.bytes() == Bytes(8, std::byte{0xCD}));
    }
    check_equal(count("cuMemcpyDtoHAsync_v2"), 2U);
    check_equal(count("cuGetProcAddress_v2"), 0U);
    reset();
    dlclose(library);  // this reference
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<
        a_missing_library_is_a_fault_that_names_it,
        a_library_that_is_no_driver_is_a_fault_that_says_so, what_a_driver_lacks_is_named,
        the_environment_names_the_library, opening_initializes_nothing,
        devices_are_counted_without_a_context, only_a_retained_device_has_a_context,
        the_context_of_the_training_process_is_shared, a_device_that_is_not_retained_is_not_entered,
        contexts_nest, what_is_created_is_destroyed,
        memory_that_others_have_registered_is_left_to_them, copies_go_there_and_back,
        nothing_to_copy_is_no_call, faults_are_in_the_words_of_the_driver,
        an_error_of_execution_fails_all_that_follows, a_driver_that_is_gone_is_no_trouble,
        a_context_that_is_gone_is_no_trouble, a_relaxed_thread_breaks_no_capture,
        any_other_thread_breaks_a_capture, an_old_driver_is_asked_by_exported_names>();
}
