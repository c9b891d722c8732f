// A driver that a test may make fail, throw or lie.

#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

#include "device/device_api.h"

namespace datastates::testing {

class HookedDeviceApi final : public DeviceApi {
  public:
    /// Called after the driver's call of this name has been made; what it returns or throws is what
    /// the caller sees, if it is not nothing.
    using Hook = std::function<std::optional<Fault>(std::string_view)>;

    explicit HookedDeviceApi(std::shared_ptr<DeviceApi> driver, Hook hook = nullptr)
        : driver_(std::move(driver)), hook_(std::move(hook)) {}

    /// From now on, whatever is asked for is said to be done.
    void lie() { lies_ = true; }
    /// To be called before it is used.
    void pin_slowly(std::chrono::milliseconds each) { before_pinning_ = each; }

    Result<int> device_count() override { return driver_->device_count(); }
    Status retain(int device) override { return driver_->retain(device); }
    void release(int device) override { driver_->release(device); }
    int near_node(int device) override { return driver_->near_node(device); }
    Status enter(int device) override { return driver_->enter(device); }
    void leave() override { driver_->leave(); }
    Result<CaptureMode> exchange_capture(CaptureMode mode) override {
        return driver_->exchange_capture(mode);
    }
    Result<StreamHandle> create_stream() override { return driver_->create_stream(); }
    void destroy_stream(StreamHandle stream) override { driver_->destroy_stream(stream); }
    Result<EventHandle> create_event() override {
        if (auto hooked = then("create_event", Status()); !hooked.ok()) {
            return std::move(hooked).fault();  // so that no event is left over
        }
        return driver_->create_event();
    }
    void destroy_event(EventHandle event) override { driver_->destroy_event(event); }
    Status record(EventHandle event, StreamHandle stream) override {
        return then("record", driver_->record(event, stream));
    }
    Result<bool> is_done(EventHandle event) override {
        auto done = then("is_done", driver_->is_done(event));
        if (done.ok() && lies_) return true;
        return done;
    }
    Status stream_wait(StreamHandle stream, EventHandle event) override {
        return then("stream_wait", driver_->stream_wait(stream, event));
    }
    Status copy(Direction direction, std::span<const DeviceCopy> copies,
                StreamHandle stream) override {
        return then("copy", driver_->copy(direction, copies, stream));
    }
    Status register_host(std::byte* data, std::uint64_t nbytes) override {
        std::this_thread::sleep_for(before_pinning_);
        return driver_->register_host(data, nbytes);
    }
    void unregister_host(std::byte* data) override { driver_->unregister_host(data); }

  private:
    template <typename T>
    Result<T> then(std::string_view call, Result<T> result) {
        if (!result.ok() || !hook_) return result;
        if (auto fault = hook_(call)) return std::move(*fault);
        return result;
    }

    const std::shared_ptr<DeviceApi> driver_;
    const Hook hook_;  // called by any thread
    std::atomic<bool> lies_ = false;
    std::chrono::milliseconds before_pinning_{0};
};

}  // namespace datastates::testing
