#include "small_copies.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <mutex>
#include <string>
#include <utility>

#include "arena.h"
#include "device.h"

namespace datastates {
namespace {

/// For fewer, a launch is no gain.
constexpr std::size_t kFew = 4;

/// What a kernel is tried on: memory with a pattern, room for copies of it, and the copies, of all
/// alignments and of sizes around those of the units that its threads copy.
class Trial {
  public:
    Trial() : memory_(2 * kHalf) {
        for (std::size_t n = 0; n < kHalf; ++n) {
            memory_.data()[n] = static_cast<std::byte>((n * 31 + n / 251) % 255 + 1);
        }
        for (const std::size_t nbytes : {1U, 3U, 16U, 33U, 254U, 1030U}) {
            for (const std::size_t to : {0U, 1U, 2U, 4U, 8U}) {
                for (const std::size_t from : {0U, 1U, 2U, 4U}) add(to, kSource + from, nbytes);
            }
        }
        add(0, 48, std::size_t{40} << 10U);  // more than all threads copy at once
    }

    [[nodiscard]] std::span<std::byte> memory() const { return {memory_.data(), 2 * kHalf}; }
    /// Pieces for one block each, and one for several.
    [[nodiscard]] std::span<const DeviceCopy> small() const {
        return std::span(copies_).first(copies_.size() - 1);
    }
    [[nodiscard]] std::span<const DeviceCopy> large() const { return std::span(copies_).last(1); }

    /// Each byte that was to be written is what it should be, and no other is written.
    [[nodiscard]] bool succeeded() const {
        std::vector<std::byte> expected(kHalf);
        std::byte* const copied = memory_.data() + kHalf;
        for (const DeviceCopy& copy : copies_) {
            std::copy_n(copy.from, copy.nbytes, expected.data() + (copy.to - copied));
        }
        return std::equal(expected.begin(), expected.end(), copied);
    }

  private:
    static constexpr std::size_t kSource = 272;
    static constexpr std::size_t kHalf = std::size_t{128} << 10U;

    /// Places are from a multiple of 16 on.
    void add(std::size_t to, std::size_t from, std::size_t nbytes) {
        copies_.push_back({.to = memory_.data() + kHalf + end_ + to,
                           .from = memory_.data() + from,
                           .nbytes = nbytes});
        end_ = (end_ + to + nbytes) / 16 * 16 + 32;
    }

    Arena memory_;
    std::size_t end_ = 16;  // of what is copied to
    std::vector<DeviceCopy> copies_;
};

void keep_for_good(std::unique_ptr<Trial> trial, std::unique_ptr<PinnedMemory> pinned) {
    struct Kept {
        std::unique_ptr<Trial> trial;
        std::unique_ptr<PinnedMemory> pinned;
        Kept* next = nullptr;
    };
    static std::mutex mutex;      // guards kept
    static Kept* kept = nullptr;  // all of them: reached from here, they are no leak
    auto made = std::make_unique<Kept>();
    made->trial = std::move(trial);
    made->pinned = std::move(pinned);
    const std::scoped_lock lock(mutex);
    made->next = kept;
    kept = made.release();
}

Fault unusable(std::string why) {
    return {.kind = FaultKind::kDevice,
            .path = {},
            .operation = "copying by a kernel",
            .detail = std::move(why)};
}

/// Waits for the copies. `idle` is false if the device may still be at work.
MaybeFault try_on(const Trial& trial, Device& device, KernelHandle kernel,
                  const std::function<bool()>& give_up, bool& idle) {
    DeviceApi& api = device.api();
    if (api.mapped(trial.memory().data()).size() != trial.memory().size()) {
        return unusable("pinned memory has another address on the device");
    }
    const StreamHandle stream = device.save_stream();
    const auto enqueue = [&] {
        if (auto fault = api.copy_by_kernel(kernel, trial.small(), stream)) return fault;
        return api.copy_by_kernel(kernel, trial.large(), stream);
    };
    std::shared_ptr<DeviceEvent> done;
    auto fault = device.run(stream, {}, enqueue, done);
    if (!done) return fault;
    auto failed = done->wait_idle(give_up, idle);
    if (!fault) fault = std::move(failed);
    if (!fault && !idle) return unusable("it was not done in time");
    if (!fault && !trial.succeeded()) return unusable("it gives wrong bytes");
    return fault;
}

}  // namespace

MaybeFault SmallCopies::load(const std::shared_ptr<Device>& device,
                             const std::function<bool()>& give_up) {
    const DeviceScope scope(device->api(), device->number());
    if (scope.fault()) return scope.fault();
    KernelHandle kernel = 0;
    if (auto fault = device->api().load_kernel(kernel)) return fault;
    auto trial = std::make_unique<Trial>();
    std::unique_ptr<PinnedMemory> pinned;
    if (auto fault = PinnedMemory::pin(device, trial->memory(), pinned)) return fault;
    bool idle = true;
    auto fault = try_on(*trial, *device, kernel, give_up, idle);
    if (!idle) {  // a device that hangs may go on one day: the memory must be there then
        keep_for_good(std::move(trial), std::move(pinned));
    }
    if (!fault) kernel_ = kernel;
    return fault;
}

MaybeFault SmallCopies::enqueue(DeviceApi& api, std::span<const DeviceCopy> copies,
                                StreamHandle stream, std::vector<DeviceCopy>& rest) const {
    std::vector<DeviceCopy> small;
    small.reserve(copies.size());
    std::span<std::byte> mapped;  // that the last one was in
    for (const DeviceCopy& copy : copies) {
        if (copy.nbytes > kSmallCopy) {
            rest.push_back(copy);
            continue;
        }
        if (!lies_in(mapped, copy.to, copy.nbytes)) mapped = api.mapped(copy.to);
        (lies_in(mapped, copy.to, copy.nbytes) ? small : rest).push_back(copy);
    }
    if (small.size() < kFew) {
        rest.insert(rest.end(), small.begin(), small.end());
        return std::nullopt;
    }
    return api.copy_by_kernel(kernel_, small, stream);
}

}  // namespace datastates
