#include "support.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <thread>
#include <utility>

#include "check.h"
#include "files/crc32c.h"

namespace datastates::testing {

TemporaryDirectory::TemporaryDirectory() {
    const char* const base = std::getenv("DATASTATES_TEST_DIR");
    auto pattern =
        (std::filesystem::path(base != nullptr ? base : std::filesystem::temp_directory_path()) /
         "datastates-XXXXXX")
            .string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = pattern;
}

TemporaryDirectory::~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
}

Bytes random_bytes(std::uint64_t size, std::uint64_t seed) {
    Bytes bytes(size);
    Random random(seed);
    for (std::uint64_t i = 0; i < size; i += 8) {
        const std::uint64_t word = random();
        std::memcpy(bytes.data() + i, &word, std::min<std::uint64_t>(8, size - i));
    }
    return bytes;
}

std::uint64_t random_below(Random& random, std::uint64_t bound) {
    return std::uniform_int_distribution<std::uint64_t>(0, bound - 1)(random);
}

Bytes read_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    if (!in) throw std::runtime_error("cannot read " + path);
    Bytes bytes(std::filesystem::file_size(path));
    in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    return bytes;
}

std::string text_of(const std::string& path) {
    const Bytes bytes = read_file(path);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void write_file(const std::string& path, std::span<const std::byte> bytes) {
    std::ofstream out(path, std::ios::binary | std::ios::trunc);
    out.write(reinterpret_cast<const char*>(bytes.data()),
              static_cast<std::streamsize>(bytes.size()));
    if (!out) throw std::runtime_error("cannot write " + path);
}

Clock::time_point in(double seconds) {
    return Clock::now() +
           std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

void wait_until(std::string_view what, const std::function<bool()>& holds, double seconds,
                std::source_location where) {
    const auto deadline = in(seconds);
    while (!holds()) {
        check(Clock::now() < deadline, what, where);
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

Failpoint error_at(std::string name, int error, std::optional<std::uint64_t> nth) {
    return {
        .name = std::move(name), .nth = nth, .action = Failpoint::Action::kError, .error = error};
}

Failpoint sleep_at(std::string name, double seconds, std::optional<std::uint64_t> nth) {
    return {.name = std::move(name),
            .nth = nth,
            .action = Failpoint::Action::kSleep,
            .time = std::chrono::duration<double>(seconds)};
}

OneCore::OneCore() : before_() {
    sched_getaffinity(0, sizeof before_, &before_);
    std::size_t core = 0;
    while (!CPU_ISSET(core, &before_)) ++core;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    sched_setaffinity(0, sizeof one, &one);
}

OneCore::~OneCore() {
    sched_setaffinity(0, sizeof before_, &before_);
}

void starve(pid_t thread) {
    const sched_param none{};
    sched_setscheduler(thread, SCHED_IDLE, &none);
}

void check_all_free(const HostCache& cache) {
    const auto all_free = [&] {
        return cache.stats().free_segments == cache.stats().total_segments;
    };
    wait_until("segments leaked", all_free, 30);
    check_equal(cache.stats().slab_segments, 0U);
}

std::shared_ptr<Window> open_window() {
    return std::make_shared<Window>(Clock::now());
}

void check_durable(const SaveHandle& save, std::source_location where) {
    check(save->wait(in(120)), "the save ends", where);
    const auto fault = save->fault();
    check(!fault, fault ? describe(*fault) : "", where);
}

void check_restored(const RestoreHandle& restore, std::source_location where) {
    check(restore->wait(in(120)), "the restore ends", where);
    const auto fault = restore->fault();
    check(!fault, fault ? describe(*fault) : "", where);
}

RestoreFile whole_file(const std::string& path, Bytes& out) {
    Transfer transfer;
    transfer.add(0, out.size(), out.data(), 0);
    return {path, file_bytes(out.size()), out.size(), transfer};
}

Bytes reference_file(std::span<const std::byte> stream) {
    std::vector<std::uint32_t> table;
    for (std::uint64_t at = 0; at < stream.size(); at += kMiB) {
        table.push_back(crc32c_portable(stream.subspan(at, std::min(kMiB, stream.size() - at))));
    }
    table.push_back(crc32c_portable(std::as_bytes(std::span(table))));
    Bytes file(stream.begin(), stream.end());
    const auto words = std::as_bytes(std::span(table));
    file.insert(file.end(), words.begin(), words.end());
    return file;
}

Source::Source(std::uint64_t size, std::uint64_t max_region, std::uint64_t seed)
    : memory(random_bytes(size, seed)), stream(size, std::byte{0}) {
    Random random(seed);
    for (std::uint64_t at = 0; at < size;) {
        const std::uint64_t length = std::min(size - at, 1 + random_below(random, max_region));
        if (random_below(random, 5) != 0) {
            regions.push_back({.begin = at, .end = at + length});
        }
        at += length;
    }
    // Each at the same place in memory as in the stream, but added in any order.
    std::ranges::shuffle(regions, random);
    for (const Range& region : regions) {
        std::memcpy(stream.data() + region.begin, memory.data() + region.begin, region.size());
        transfer.add(region.begin, region.size(), memory.data() + region.begin,
                     static_cast<Group>(random_below(random, 3)));
    }
}

std::vector<HookedFileOps::Event> HookedFileOps::trace() const {
    const std::scoped_lock lock(mutex_);
    return trace_;
}

std::size_t HookedFileOps::open_files() const {
    const std::scoped_lock lock(mutex_);
    return paths_.size();
}

HookedFileOps::Instead HookedFileOps::observe(Call call, int fd, std::uint64_t offset,
                                              std::uint64_t size) {
    Event event{.call = call, .path = {}, .offset = offset, .size = size};
    {
        const std::scoped_lock lock(mutex_);
        event.path = paths_.at(fd);
        trace_.push_back(event);
        if (call == Call::kClose) paths_.erase(fd);
    }
    return hook_ ? hook_(event) : Instead{};
}

SysResult HookedFileOps::open(const std::string& path, int flags, mode_t mode) {
    const Event event{.call = Call::kOpen, .path = path};
    if (hook_) {
        if (const auto instead = hook_(event).result) return *instead;
    }
    const std::scoped_lock lock(mutex_);
    const auto result = system_->open(path, flags, mode);
    trace_.push_back(event);
    if (result.ok()) paths_[static_cast<int>(result.value)] = path;
    return result;
}

SysResult HookedFileOps::set_direct(int fd, bool direct) {
    const auto instead = observe(Call::kSetDirect, fd, 0, direct ? 1 : 0).result;
    return instead ? *instead : system_->set_direct(fd, direct);
}

SysResult HookedFileOps::size(int fd) {
    const auto instead = observe(Call::kSize, fd, 0, 0).result;
    return instead ? *instead : system_->size(fd);
}

SysResult HookedFileOps::allocate(int fd, std::uint64_t nbytes) {
    const auto instead = observe(Call::kAllocate, fd, 0, nbytes).result;
    return instead ? *instead : system_->allocate(fd, nbytes);
}

SysResult HookedFileOps::write(int fd, std::span<const std::byte> data, std::uint64_t offset) {
    const auto instead = observe(Call::kWrite, fd, offset, data.size());
    if (instead.result) return *instead.result;
    if (instead.cut) data = data.first(std::min<std::size_t>(data.size(), *instead.cut));
    return system_->write(fd, data, offset);
}

SysResult HookedFileOps::read(int fd, std::span<std::byte> data, std::uint64_t offset) {
    const auto instead = observe(Call::kRead, fd, offset, data.size());
    if (instead.result) return *instead.result;
    if (instead.cut) data = data.first(std::min<std::size_t>(data.size(), *instead.cut));
    return system_->read(fd, data, offset);
}

SysResult HookedFileOps::read_cached(int fd, std::span<std::byte> data, std::uint64_t offset) {
    const auto instead = observe(Call::kReadCached, fd, offset, data.size());
    if (instead.result) return *instead.result;
    if (!instead.cut) return {.value = -1, .error = EAGAIN};
    data = data.first(std::min<std::size_t>(data.size(), *instead.cut));
    const auto result = system_->read_cached(fd, data, offset);
    if (!std::cmp_equal(result.value, data.size())) ++refusals_;
    return result;
}

SysResult HookedFileOps::start_writeback(int fd, Range range) {
    const auto instead = observe(Call::kStartWriteback, fd, range.begin, range.size()).result;
    return instead ? *instead : system_->start_writeback(fd, range);
}

SysResult HookedFileOps::wait_writeback(int fd, Range range) {
    const auto instead = observe(Call::kWaitWriteback, fd, range.begin, range.size()).result;
    return instead ? *instead : system_->wait_writeback(fd, range);
}

SysResult HookedFileOps::drop_cached(int fd, Range range) {
    const auto instead = observe(Call::kDropCached, fd, range.begin, range.size()).result;
    return instead ? *instead : system_->drop_cached(fd, range);
}

SysResult HookedFileOps::truncate(int fd, std::uint64_t nbytes) {
    const auto instead = observe(Call::kTruncate, fd, 0, nbytes).result;
    return instead ? *instead : system_->truncate(fd, nbytes);
}

SysResult HookedFileOps::sync_data(int fd) {
    const auto instead = observe(Call::kSyncData, fd, 0, 0).result;
    return instead ? *instead : system_->sync_data(fd);
}

SysResult HookedFileOps::sync(int fd) {
    const auto instead = observe(Call::kSync, fd, 0, 0).result;
    return instead ? *instead : system_->sync(fd);
}

SysResult HookedFileOps::close(int fd) {
    const auto instead = observe(Call::kClose, fd, 0, 0).result;
    const auto closed = system_->close(fd);
    return instead ? *instead : closed;
}

SysResult HookedFileOps::gather_begins() {
    if (!hook_) return {};
    return hook_({.call = Call::kGather, .path = {}}).result.value_or(SysResult{});
}

}  // namespace datastates::testing
