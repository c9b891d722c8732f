#include "device/cuda_api.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "device/cuda_table.h"

namespace datastates {
namespace {

cuda::DevicePointer address_of(const std::byte* data) {
    return reinterpret_cast<std::uintptr_t>(data);
}

/// By either of its handles. It takes no batches.
bool is_legacy(StreamHandle stream) {
    return stream <= 1;
}

/// As the driver's arrays.
struct Batch {
    explicit Batch(std::span<const DeviceCopy> copies) {
        to.reserve(copies.size());
        from.reserve(copies.size());
        nbytes.reserve(copies.size());
        for (const DeviceCopy& copy : copies) {
            if (copy.nbytes == 0) continue;  // a batch may not have such
            to.push_back(address_of(copy.to));
            from.push_back(address_of(copy.from));
            nbytes.push_back(copy.nbytes);
        }
    }

    std::vector<cuda::DevicePointer> to;
    std::vector<cuda::DevicePointer> from;
    std::vector<std::size_t> nbytes;
};

class CudaApi final : public DeviceApi {
  public:
    CudaApi(const cuda::Table& table, CopyBatches batches)
        : table_(table),
          wanted_(batches),
          batches_(table.copy_batch.function != nullptr && batches != CopyBatches::kNever) {}

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
    [[nodiscard]] int attribute(int which, cuda::Device device) const;
    [[nodiscard]] bool takes_batches(cuda::Device device) const;
    [[nodiscard]] bool are_mapped(Direction direction, std::span<const DeviceCopy> copies) const;
    [[nodiscard]] Status copy_batches(std::span<const DeviceCopy> copies,
                                      StreamHandle stream) const;

    /// Host memory that was registered.
    struct Registered {
        std::uint64_t mapped = 0;  ///< bytes that devices find at the host's addresses
        bool ours = true;          ///< not pinned by others, who will unpin it
    };

    const cuda::Table table_;
    const CopyBatches wanted_;
    std::atomic<bool> batches_;  // the driver and all devices in use take them, none has refused
    mutable std::mutex mutex_;   // guards what follows
    std::map<int, Retained> retained_;
    std::map<const std::byte*, Registered> registered_;  // by where it begins
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
    if (!takes_batches(retained.device)) batches_ = false;
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
    return attribute(cuda::kHostNumaId, of);  // drivers before 12.2 do not know
}

/// -1 if the driver does not know.
int CudaApi::attribute(int which, cuda::Device device) const {
    int value = -1;
    const cuda::Result result = table_.device_attribute.function(&value, which, device);
    return result == cuda::kSuccess ? value : -1;
}

/// Valid batches have crashed and hung on devices of capability 10 and 12 (vllm-project/vllm issue
/// 49276, InternLM/lmdeploy pull request 4838), so only those are trusted that others have used for
/// long.
bool CudaApi::takes_batches(cuda::Device device) const {
    if (wanted_ == CopyBatches::kAlways) return true;
    const int major = attribute(cuda::kComputeCapabilityMajor, device);
    return (major == 8 || major == 9) && attribute(cuda::kUnifiedAddressing, device) == 1 &&
           attribute(cuda::kUsesHostPointers, device) == 1;
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
    if (copies.size() > 1 && batches_ && !is_legacy(stream) && are_mapped(direction, copies)) {
        if (copy_batches(copies, stream).ok()) return {};
        // There are drivers that know the call and refuse it, some by the platform or the memory.
        // What it has enqueued is enqueued again, and makes the same bytes.
        batches_ = false;
    }
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

/// A batch takes the host's addresses as they are. Where the device has other ones for that memory
/// (it has on WSL 2: sgl-project/sglang issue 40232), or none, some drivers refuse the batch, and
/// some enqueue it and end in an illegal access, which ends training.
bool CudaApi::are_mapped(Direction direction, std::span<const DeviceCopy> copies) const {
    const std::scoped_lock lock(mutex_);
    return std::ranges::all_of(copies, [&](const DeviceCopy& copy) {
        if (copy.nbytes == 0) return true;
        const std::byte* const host = direction == Direction::kGather ? copy.to : copy.from;
        const auto after = registered_.upper_bound(host);
        if (after == registered_.begin()) return false;
        const auto& [begin, memory] = *std::prev(after);
        return lies_in({begin, memory.mapped}, host, copy.nbytes);
    });
}

Status CudaApi::copy_batches(std::span<const DeviceCopy> copies, StreamHandle stream) const {
    constexpr std::size_t kMost = 1024;  // drivers have had trouble with tens of thousands
    while (!copies.empty()) {
        Batch batch(copies.first(std::min(copies.size(), kMost)));
        copies = copies.subspan(std::min(copies.size(), kMost));
        if (batch.nbytes.empty()) continue;
        cuda::CopyAttributes attributes;
        attributes.source_access_order = cuda::kSourceInStreamOrder;
        attributes.flags = cuda::kOverlapWithCompute;
        std::size_t first = 0;  // of the copies with these attributes
        std::size_t failing = SIZE_MAX;
        auto done = run(table_.copy_batch, batch.to.data(), batch.from.data(), batch.nbytes.data(),
                        batch.nbytes.size(), &attributes, &first, std::size_t{1}, &failing, stream);
        if (!done.ok()) return done;
    }
    return {};
}

Status CudaApi::register_host(std::byte* data, std::uint64_t nbytes) {
    {
        const std::scoped_lock lock(mutex_);
        registered_.try_emplace(data);  // now, as it may throw; nothing is mapped yet
    }
    const cuda::Result result =
        table_.host_register.function(data, static_cast<std::size_t>(nbytes),
                                      cuda::kHostRegisterPortable | cuda::kHostRegisterMapped);
    if (result == cuda::kHostMemoryAlreadyRegistered) {
        const std::scoped_lock lock(mutex_);
        registered_[data].ours = false;
        return {};
    }
    if (auto done = outcome(table_.host_register.name, result); !done.ok()) return done;
    // Devices with unified addressing all find it at one address: the host's, or none does.
    cuda::DevicePointer seen = 0;
    if (table_.host_device_pointer.function(&seen, data, 0U) == cuda::kSuccess &&
        seen == address_of(data)) {
        const std::scoped_lock lock(mutex_);
        registered_[data].mapped = nbytes;
    }
    return {};
}

void CudaApi::unregister_host(std::byte* data) {
    {
        const std::scoped_lock lock(mutex_);
        const auto found = registered_.find(data);
        const bool ours = found == registered_.end() || found->second.ours;
        if (found != registered_.end()) registered_.erase(found);
        if (!ours) return;
    }
    static_cast<void>(table_.host_unregister.function(data));
}

}  // namespace

std::string cuda_library() {
    const char* const named = std::getenv("DCP_DATASTATES_CUDA_LIBRARY");
    return named != nullptr && *named != '\0' ? named : "libcuda.so.1";
}

CopyBatches cuda_batches() {
    const char* const chosen = std::getenv("DCP_DATASTATES_CUDA_BATCH");
    const std::string_view value = chosen == nullptr ? "" : chosen;
    if (value == "0") return CopyBatches::kNever;
    return value == "1" ? CopyBatches::kAlways : CopyBatches::kWhereKnown;
}

Result<std::shared_ptr<DeviceApi>> open_cuda(const std::string& library, CopyBatches batches) {
    auto table = cuda::load(library);
    if (!table.ok()) return std::move(table).fault();
    return std::shared_ptr<DeviceApi>(std::make_shared<CudaApi>(*table, batches));
}

}  // namespace datastates
