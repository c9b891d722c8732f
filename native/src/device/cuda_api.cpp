#include "device/cuda_api.h"

#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <type_traits>
#include <utility>

#include "device/cuda_table.h"

namespace datastates {
namespace {

cuda::DevicePointer address_of(const std::byte* data) {
    return reinterpret_cast<std::uintptr_t>(data);
}

class CudaApi final : public DeviceApi {
  public:
    explicit CudaApi(const cuda::Table& table) : table_(table) {}

    Result<int> device_count() override;
    Status retain(int device) override;
    void release(int device) override;
    int near_node(int device) override;
    Status enter(int device) override;
    void leave() override;
    Result<CaptureMode> exchange_capture(CaptureMode mode) override;
    Result<StreamHandle> create_stream() override;
    void destroy_stream(StreamHandle stream) override;
    Result<EventHandle> create_event() override;
    void destroy_event(EventHandle event) override;
    Status record(EventHandle event, StreamHandle stream) override;
    Result<bool> is_done(EventHandle event) override;
    Status stream_wait(StreamHandle stream, EventHandle event) override;
    Status copy(Direction direction, std::span<const DeviceCopy> copies,
                StreamHandle stream) override;
    Status register_host(std::byte* data, std::uint64_t nbytes) override;
    void unregister_host(std::byte* data) override;

  private:
    struct Retained {
        cuda::Device device = 0;
        cuda::Context context = 0;
        int references = 0;
    };

    template <typename... Parameters, typename... Arguments>
    [[nodiscard]] Status run(const cuda::Call<Parameters...>& call, Arguments... arguments) const {
        return outcome(call.name, call.function(arguments...));
    }
    /// Makes a call whose first argument points to its result, which is `value` before.
    template <typename T, typename... Parameters, typename... Arguments>
    [[nodiscard]] Result<T> get(const cuda::Call<T*, Parameters...>& call, T value,
                                Arguments... arguments) const {
        if (auto done = run(call, &value, arguments...); !done.ok()) return std::move(done).fault();
        return value;
    }
    [[nodiscard]] Status outcome(const char* operation, cuda::Result result) const;
    [[nodiscard]] Fault failed(const char* operation, cuda::Result result) const;
    [[nodiscard]] std::string words_of(cuda::Result result) const;
    [[nodiscard]] Status copy_one(Direction direction, const DeviceCopy& copy,
                                  StreamHandle stream) const;

    const cuda::Table table_;
    std::mutex mutex_;  // guards what follows
    std::map<int, Retained> retained_;
    std::set<const std::byte*> of_others_;  // registered memory: they will unpin it
};

std::string CudaApi::words_of(cuda::Result result) const {
    const char* name = nullptr;
    const char* words = nullptr;
    static_cast<void>(table_.error_name.function(result, &name));
    static_cast<void>(table_.error_string.function(result, &words));
    const std::string number = std::to_string(result);
    if (name == nullptr) return "error " + number + ", which the driver has no name for";
    return std::string(name) + " (" + number + ")" +
           (words != nullptr ? ": " + std::string(words) : "");
}

Status CudaApi::outcome(const char* operation, cuda::Result result) const {
    if (result == cuda::kSuccess) return {};
    return failed(operation, result);
}

Fault CudaApi::failed(const char* operation, cuda::Result result) const {
    Fault fault;
    fault.kind = FaultKind::kDevice;
    fault.error = result;
    fault.operation = operation;
    fault.detail = words_of(result);
    return fault;
}

Result<int> CudaApi::device_count() {
    const cuda::Result result = table_.init.function(0);
    if (result == cuda::kNoDevice) return 0;  // a driver, and nothing for it to drive
    if (result != cuda::kSuccess) return failed(table_.init.name, result);
    return get(table_.device_count, 0);
}

Status CudaApi::retain(int device) {
    const std::scoped_lock lock(mutex_);
    const auto found = retained_.find(device);
    if (found != retained_.end()) {
        ++found->second.references;
        return {};
    }
    Retained retained{.references = 1};
    auto done = run(table_.init, 0U);
    if (done.ok()) done = run(table_.device_get, &retained.device, device);
    if (done.ok()) done = run(table_.context_retain, &retained.context, retained.device);
    if (!done.ok()) return done;
    retained_.emplace(device, retained);
    return {};
}

void CudaApi::release(int device) {
    const std::scoped_lock lock(mutex_);
    const auto found = retained_.find(device);
    if (found == retained_.end() || --found->second.references > 0) return;
    static_cast<void>(table_.context_release.function(found->second.device));
    retained_.erase(found);
}

int CudaApi::near_node(int device) {
    cuda::Device of = 0;
    {
        const std::scoped_lock lock(mutex_);
        const auto found = retained_.find(device);
        if (found == retained_.end()) return -1;
        of = found->second.device;
    }
    int node = -1;
    const cuda::Result result = table_.device_attribute.function(&node, cuda::kHostNumaId, of);
    return result == cuda::kSuccess ? node : -1;  // drivers before 12.2 do not know
}

Status CudaApi::enter(int device) {
    cuda::Context context = 0;
    {
        const std::scoped_lock lock(mutex_);
        const auto found = retained_.find(device);
        if (found != retained_.end()) context = found->second.context;
    }
    if (context != 0) return run(table_.context_push, context);
    Fault fault = failed(table_.context_push.name, cuda::kInvalidContext);
    fault.detail += "; device " + std::to_string(device) + " is not retained";
    return fault;
}

void CudaApi::leave() {
    cuda::Context popped = 0;
    static_cast<void>(table_.context_pop.function(&popped));
}

Result<CaptureMode> CudaApi::exchange_capture(CaptureMode mode) {
    static_assert(std::is_same_v<CaptureMode, cuda::CaptureMode> &&
                  kRelaxedCapture == cuda::kCaptureRelaxed);
    return get(table_.exchange_capture_mode, mode);
}

Result<StreamHandle> CudaApi::create_stream() {
    return get(table_.stream_create, StreamHandle{0}, cuda::kStreamNonBlocking);
}

void CudaApi::destroy_stream(StreamHandle stream) {
    static_cast<void>(table_.stream_destroy.function(stream));
}

Result<EventHandle> CudaApi::create_event() {
    return get(table_.event_create, EventHandle{0}, cuda::kEventDisableTiming);
}

void CudaApi::destroy_event(EventHandle event) {
    static_cast<void>(table_.event_destroy.function(event));
}

Status CudaApi::record(EventHandle event, StreamHandle stream) {
    return run(table_.event_record, event, stream);
}

Result<bool> CudaApi::is_done(EventHandle event) {
    const cuda::Result result = table_.event_query.function(event);
    if (result == cuda::kSuccess || result == cuda::kNotReady) return result == cuda::kSuccess;
    return failed(table_.event_query.name, result);
}

Status CudaApi::stream_wait(StreamHandle stream, EventHandle event) {
    return run(table_.stream_wait, stream, event, 0U);
}

Status CudaApi::copy(Direction direction, std::span<const DeviceCopy> copies, StreamHandle stream) {
    for (const DeviceCopy& each : copies) {
        if (each.nbytes == 0) continue;
        if (auto done = copy_one(direction, each, stream); !done.ok()) return done;
    }
    return {};
}

Status CudaApi::copy_one(Direction direction, const DeviceCopy& copy, StreamHandle stream) const {
    if (direction == Direction::kGather) {
        return run(table_.copy_to_host, static_cast<void*>(copy.to), address_of(copy.from),
                   static_cast<std::size_t>(copy.nbytes), stream);
    }
    return run(table_.copy_to_device, address_of(copy.to), static_cast<const void*>(copy.from),
               static_cast<std::size_t>(copy.nbytes), stream);
}

Status CudaApi::register_host(std::byte* data, std::uint64_t nbytes) {
    const cuda::Result result = table_.host_register.function(
        data, static_cast<std::size_t>(nbytes), cuda::kHostRegisterPortable);
    if (result != cuda::kHostMemoryAlreadyRegistered) {
        return outcome(table_.host_register.name, result);
    }
    const std::scoped_lock lock(mutex_);
    of_others_.insert(data);
    return {};
}

void CudaApi::unregister_host(std::byte* data) {
    {
        const std::scoped_lock lock(mutex_);
        if (of_others_.erase(data) > 0) return;
    }
    static_cast<void>(table_.host_unregister.function(data));
}

}  // namespace

std::string cuda_library() {
    const char* const named = std::getenv("DCP_DATASTATES_CUDA_LIBRARY");
    return named != nullptr && *named != '\0' ? named : "libcuda.so.1";
}

Result<std::shared_ptr<DeviceApi>> open_cuda(const std::string& library) {
    auto table = cuda::load(library);
    if (!table.ok()) return std::move(table).fault();
    return std::shared_ptr<DeviceApi>(std::make_shared<CudaApi>(*table));
}

}  // namespace datastates
