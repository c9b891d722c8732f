#include "pipeline/engine.h"

#include <optional>
#include <stdexcept>
#include <utility>

#include "base/sizes.h"

namespace datastates {
namespace {

std::shared_ptr<HostCache> make_cache(std::uint64_t nbytes, const ThreadCounts& threads) {
    if (nbytes < kMinSegments * kSegmentBytes) {
        throw std::invalid_argument("host_cache_bytes=" + std::to_string(nbytes) +
                                    " is below the minimum of " +
                                    std::to_string(kMinSegments * kSegmentBytes) + " (" +
                                    std::to_string(kMinSegments) + " segments)");
    }
    constexpr std::size_t kMaxThreads = 256;
    for (const std::size_t count : {threads.copy, threads.flush, threads.restore}) {
        if (count == 0 || count > kMaxThreads) {
            throw std::invalid_argument("a thread count of " + std::to_string(count) +
                                        " is not between 1 and " + std::to_string(kMaxThreads));
        }
    }
    return std::make_shared<HostCache>(nbytes);
}

}  // namespace

SaveHandle::SaveHandle(std::shared_ptr<SavePipeline> pipeline, std::shared_ptr<SaveJob> job)
    : pipeline_(std::move(pipeline)), job_(std::move(job)) {}

SaveHandle::~SaveHandle() {
    if (!job_->all_read() || job_->streamed()) cancel();
    job_->wait_not_reading();
}

void SaveHandle::fail(Fault fault) {
    pipeline_->fail(job_, std::move(fault));
}

RestoreHandle::RestoreHandle(std::shared_ptr<RestorePipeline> pipeline,
                             std::shared_ptr<RestoreJob> job)
    : pipeline_(std::move(pipeline)), job_(std::move(job)) {}

RestoreHandle::~RestoreHandle() {
    cancel();
    job_->wait(Clock::time_point::max());
}

void RestoreHandle::fail(Fault fault) {
    pipeline_->fail(job_, std::move(fault));
}

RestoreHandle::Requests RestoreHandle::requests() const {
    return
        [pipeline = pipeline_, job = job_](auto deadline) { return pipeline->take(job, deadline); };
}

Engine::Engine(std::uint64_t host_cache_bytes, ThreadCounts threads, std::shared_ptr<FileOps> ops,
               std::shared_ptr<DeviceApi> api, Clock::duration patience, Limits limits)
    : ops_(std::move(ops)),
      cache_(make_cache(host_cache_bytes, threads)),
      devices_(std::make_shared<Devices>(cache_, std::move(api), patience, limits.copy_rate)),
      saves_(std::make_shared<SavePipeline>(cache_, devices_, threads.copy, threads.flush,
                                            limits.write_rate, limits.io_priority)),
      restores_(std::make_shared<RestorePipeline>(cache_, devices_, threads.restore)) {}

void Engine::grow(std::uint64_t nbytes) {
    devices_->pinner().grow(nbytes);
}

void Engine::require_open(const StreamContent& content) const {
    for (const int device : content.devices()) {
        if (devices_->find(device) == nullptr) {
            throw std::invalid_argument("device " + std::to_string(device) + " was not opened");
        }
    }
}

Enqueued Engine::copy_to_host(const StreamContent& content, std::byte* out, int device,
                              StreamHandle stream) {
    require_open(content);
    std::map<int, DeviceWork> work;
    content.list(Direction::kGather, {.begin = 0, .end = content.end()}, out, work);
    std::uint64_t listed = 0;
    for (const auto& [number, each] : work) {
        for (const GroupBytes& group : each.groups) listed += group.nbytes;
    }
    if (listed != content.nbytes() || work.size() != 1 || !work.contains(device)) {
        throw std::invalid_argument("not all regions are on device " + std::to_string(device));
    }
    auto pinned = devices_->pinner().wait(out, content.end());
    if (!pinned.ok()) return {.status = std::move(pinned), .done = nullptr};
    return devices_->find(device)->copy(Direction::kGather, work[device].copies, stream);
}

void Engine::check_files(const std::vector<SaveFile>& files) const {
    std::vector<std::string> paths;
    paths.reserve(files.size());
    for (const SaveFile& file : files) {
        paths.push_back(file.path);
        require_open(*file.content);
    }
    check_distinct(paths);
}

std::shared_ptr<SaveHandle> Engine::save(const std::vector<SaveFile>& files,
                                         std::vector<std::string> sync_directories,
                                         std::uint64_t order, const std::shared_ptr<Window>& window,
                                         Fences fences, std::shared_ptr<ExpectedBytes> expected) {
    check_files(files);
    return submit(std::make_shared<SaveJob>(files, std::move(sync_directories), order, window, ops_,
                                            std::move(fences), std::move(expected)));
}

std::shared_ptr<SaveHandle> Engine::save_streamed(const std::vector<SaveFile>& files,
                                                  std::uint64_t order,
                                                  const std::shared_ptr<Window>& window,
                                                  Fences fences,
                                                  std::shared_ptr<ExpectedBytes> expected) {
    check_files(files);
    return submit(std::make_shared<SaveJob>(files, std::vector<std::string>{}, order, window, ops_,
                                            std::move(fences), std::move(expected),
                                            Output::kStreams));
}

std::shared_ptr<SaveHandle> Engine::submit(const std::shared_ptr<SaveJob>& job) {
    auto handle = std::make_shared<SaveHandle>(saves_, job);
    if (!saves_->submit(job)) throw std::runtime_error("the engine is shut down");
    return handle;
}

std::shared_ptr<RestoreHandle> Engine::restore(const std::vector<RestoreFile>& files,
                                               Fences fences) {
    for (const RestoreFile& file : files) require_open(*file.content);
    return submit(std::make_shared<RestoreJob>(files, ops_, std::move(fences)));
}

std::shared_ptr<RestoreHandle> Engine::restore_streamed(const std::vector<RestoreFile>& files,
                                                        Fences fences) {
    for (const RestoreFile& file : files) require_open(*file.content);
    return submit(
        std::make_shared<RestoreJob>(files, ops_, std::move(fences), RestoreJob::Input::kStreams));
}

std::shared_ptr<RestoreHandle> Engine::submit(const std::shared_ptr<RestoreJob>& job) {
    auto handle = std::make_shared<RestoreHandle>(restores_, job);  // before any thread has the job
    if (!restores_->submit(job)) throw std::runtime_error("the engine is shut down");
    return handle;
}

std::vector<std::string> Engine::shutdown(Clock::duration patience) {
    const std::scoped_lock lock(shutdown_mutex_);
    if (!alive_.exchange(false)) return {};
    cache_->close();
    devices_->begin_shutdown();
    saves_->stop();
    restores_->stop();
    devices_->shutdown();  // before the threads end, to which goes what devices are done with
    const auto deadline = Clock::now() + patience;
    auto held_up = saves_->join(deadline);
    for (std::string& name : restores_->join(deadline)) held_up.push_back(std::move(name));
    return held_up;
}

}  // namespace datastates
