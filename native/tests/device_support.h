// A fake device, as its training process and the engine see it.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <span>
#include <thread>
#include <vector>

#include "base/immovable.h"
#include "base/status.h"
#include "check.h"
#include "device/cuda_api.h"
#include "device/device_api.h"
#include "fake_cuda.h"
#include "support.h"

namespace datastates::testing {

template <typename T>
std::optional<Fault> fault_of(const Result<T>& result) {
    return result.ok() ? std::nullopt : std::optional<Fault>(result.fault());
}

inline void check_ok(const std::optional<Fault>& fault,
                     std::source_location where = std::source_location::current()) {
    check(!fault, fault ? describe(*fault) : "", where);
}

template <typename T>
void check_ok(const Result<T>& result,
              std::source_location where = std::source_location::current()) {
    check_ok(fault_of(result), where);
}

/// The value of a result that must have one.
template <typename T>
T value_of(Result<T> result, std::source_location where = std::source_location::current()) {
    check_ok(result, where);
    return *std::move(result);
}

inline void check_error(const std::optional<Fault>& fault, int error,
                        std::source_location where = std::source_location::current()) {
    check(fault.has_value(), "nothing failed", where);
    check(fault->kind == FaultKind::kDevice, describe(*fault), where);
    check_equal(fault->error, error, where);
}

template <typename T>
void check_error(const Result<T>& result, int error,
                 std::source_location where = std::source_location::current()) {
    check_error(fault_of(result), error, where);
}

/// The fake driver, new, and the engine's view of it.
struct FakeDriver : Immovable {
    explicit FakeDriver(std::uint64_t seed = 1, std::uint32_t max_delay_us = 200) {
        fake_cuda_reset();
        fake_cuda_configure(0, seed, max_delay_us, 0);
        api = value_of(open_cuda(FAKE_CUDA_LIBRARY));
    }
    ~FakeDriver() { fake_cuda_reset(); }

    std::shared_ptr<DeviceApi> api;
};

/// This thread is bound to a device.
class Entered : public Immovable {
  public:
    Entered(DeviceApi& api, int device) : api_(api), device_(device) {
        check_ok(api_.retain(device));
        check_ok(api_.enter(device));
    }
    ~Entered() {
        api_.leave();
        api_.release(device_);
    }

    StreamHandle stream() { return value_of(api_.create_stream()); }
    EventHandle event() { return value_of(api_.create_event()); }
    bool is_done(EventHandle event) { return value_of(api_.is_done(event)); }
    void wait(EventHandle event) {
        wait_until("the event is never done", [&] { return is_done(event); });
    }
    /// One copy, in whichever direction.
    Status copy(Direction direction, std::byte* to, const std::byte* from, std::uint64_t nbytes,
                StreamHandle stream) {
        const DeviceCopy copy{.to = to, .from = from, .nbytes = nbytes};
        return api_.copy(direction, {&copy, 1}, stream);
    }

  private:
    DeviceApi& api_;
    int device_;
};

/// Memory of a device.
inline std::span<std::byte> device_memory(int device, std::uint64_t nbytes) {
    auto* const data = static_cast<std::byte*>(fake_cuda_alloc(device, nbytes));
    check(data != nullptr, "no device memory");
    return {data, nbytes};
}

/// Pinned host memory.
class PinnedMemory : public Immovable {
  public:
    PinnedMemory(DeviceApi& api, std::uint64_t nbytes) : api_(api), bytes_(nbytes) {
        check_ok(api_.register_host(bytes_.data(), nbytes));
    }
    ~PinnedMemory() { api_.unregister_host(bytes_.data()); }

    [[nodiscard]] std::byte* data() { return bytes_.data(); }
    [[nodiscard]] const Bytes& bytes() const { return bytes_; }

  private:
    DeviceApi& api_;
    Bytes bytes_;
};

/// A stream of the training process.
inline StreamHandle training_stream(int device, bool blocking = false) {
    StreamHandle stream = 0;
    check_equal(fake_cuda_create_stream(device, blocking ? 1 : 0, &stream), 0);
    return stream;
}

/// Keeps a stream busy until it is opened.
class Gate : public Immovable {
  public:
    ~Gate() { open(); }

    void close(int device, StreamHandle stream) {
        check_equal(fake_cuda_launch(device, stream, &Gate::wait, &open_), 0);
    }
    void open() { open_ = true; }

  private:
    static void wait(void* open) {
        while (!*static_cast<std::atomic<bool>*>(open)) std::this_thread::yield();
    }

    std::atomic<bool> open_ = false;
};

}  // namespace datastates::testing
