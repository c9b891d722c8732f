#include "device/devices.h"

#include <exception>
#include <new>
#include <system_error>
#include <utility>

#include "device/cuda_api.h"

namespace datastates {
namespace {

Fault no_thread(const std::system_error& error) {
    return {.kind = FaultKind::kIo,
            .error = error.code().value(),
            .path = {},
            .operation = "starting a thread",
            .detail = {}};
}

/// Copies by several devices, as one. The last of them to be done says so.
class Copying {
  public:
    Copying(std::size_t devices, DeviceLane::Done done) : left_(devices), done_(std::move(done)) {}

    void one_is_done(CopyOutcome outcome) {
        {
            const std::scoped_lock lock(mutex_);
            if (all_.status.ok()) all_.status = std::move(outcome.status);
            all_.finished = all_.finished && outcome.finished;
            if (--left_ > 0) return;
        }
        std::exchange(done_, nullptr)(std::exchange(all_, {}));
    }

  private:
    std::mutex mutex_;  // guards what follows
    std::size_t left_;
    CopyOutcome all_;
    DeviceLane::Done done_;
};

}  // namespace

Status Devices::open(int device) {
    const std::scoped_lock opening(opening_);
    if (find_opened(device) != nullptr) return {};
    if (!api_) {
        auto cuda = open_cuda(cuda_library());
        if (!cuda.ok()) return std::move(cuda).fault();
        api_ = *std::move(cuda);
    }
    auto opened = Device::open(api_, device);
    if (!opened.ok()) return std::move(opened).fault();
    auto lanes = std::make_unique<Opened>(*opened, patience_, bytes_per_second_);
    const std::scoped_lock lock(mutex_);
    if (stopping_) return shut_down();
    pinner_.start(*opened);
    opened_.emplace(device, std::move(lanes));
    return {};
}

Devices::Opened* Devices::find_opened(int device) const {
    const std::scoped_lock lock(mutex_);
    const auto found = opened_.find(device);
    return found == opened_.end() ? nullptr : found->second.get();
}

std::shared_ptr<Device> Devices::find(int device) const {
    const Opened* const found = find_opened(device);
    return found == nullptr ? nullptr : found->from.device();
}

void Devices::copy(Direction direction, std::span<const std::byte> segment,
                   const std::map<int, DeviceWork>& work, JobFences& fences, const Queued& queued,
                   DeviceLane::Done done) {
    // One more, this thread: it reads the list.
    const auto copying = std::make_shared<Copying>(work.size() + 1, std::move(done));
    const Status pinned = pinner_.wait(segment.data(), segment.size());
    for (const auto& [number, each] : work) {
        Status status = pinned;
        try {
            if (status.ok()) {
                Opened& opened = *find_opened(number);
                DeviceLane& lane = direction == Direction::kGather ? opened.from : opened.to;
                lane.copy(
                    each.copies, fences, [&](const auto& events) { queued(each.groups, events); },
                    [copying](CopyOutcome outcome) { copying->one_is_done(std::move(outcome)); });
                continue;
            }
        } catch (const std::system_error& error) {  // the lane's thread; nothing was enqueued
            status = no_thread(error);
        } catch (const std::exception&) {
            status = out_of_memory("copy");
        }
        copying->one_is_done({.status = std::move(status), .finished = true});
    }
    copying->one_is_done({});
}

void Devices::shutdown() {
    {
        const std::scoped_lock lock(mutex_);
        stopping_ = true;
        patience_.begin();
    }
    pinner_.shutdown();
    for (const auto& [number, opened] : opened_) {  // stopping_: no more are added
        opened->from.shutdown();
        opened->to.shutdown();
    }
}

}  // namespace datastates
