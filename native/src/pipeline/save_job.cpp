#include "pipeline/save_job.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <span>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "files/crc32c.h"

namespace datastates {
namespace {

constexpr std::uint64_t kChecksumBytes = sizeof(std::uint32_t);

double seconds_between(Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double>(std::max(to, from) - from).count();
}

std::shared_ptr<const ExpectedBytes> indexed(std::shared_ptr<ExpectedBytes> expected) {
    if (expected) expected->index();
    return expected;
}

std::string name_of(const std::vector<SaveFile>& files,
                    const std::vector<std::string>& directories) {
    const auto written = std::ranges::find_if(files, &SaveFile::is_written);
    if (written != files.end()) return written->path;
    return directories.empty() ? "" : directories.front();
}

void check_path(const std::string& path) {
    if (path.find('\0') != std::string::npos) {
        throw std::invalid_argument("path has a NUL character");
    }
}

}  // namespace

std::vector<std::uint32_t> table_of(std::vector<std::uint32_t> checksums) {
    checksums.push_back(crc32c(std::as_bytes(std::span(checksums))));
    return checksums;
}

void check_distinct(const std::vector<std::string>& paths) {
    std::set<std::string_view> seen;
    for (const std::string& path : paths) {
        if (!path.empty() && !seen.insert(path).second) {
            throw std::invalid_argument("'" + path + "' is written twice by one save");
        }
    }
}

std::uint64_t file_bytes(std::uint64_t table_offset) {
    return table_offset + kChecksumBytes * (divide_up(table_offset, kBlockBytes) + 1);
}

SaveFile::SaveFile(std::string file_path, std::uint64_t offset, const Transfer& transfer)
    : path(std::move(file_path)), table_offset(offset) {
    constexpr std::uint64_t kMaxFile = std::uint64_t{1} << 62U;
    check_path(path);
    if (table_offset % kChecksumBytes != 0) {
        throw std::invalid_argument("table_offset=" + std::to_string(table_offset) +
                                    " is not a multiple of 4, in '" + path + "'");
    }
    if (table_offset > kMaxFile) {
        throw std::invalid_argument("table_offset=" + std::to_string(table_offset) +
                                    " is too large, in '" + path + "'");
    }
    content = std::make_shared<const StreamContent>(transfer);
    if (content->end() > table_offset) {
        throw std::invalid_argument("a region ends at " + std::to_string(content->end()) +
                                    ", beyond table_offset=" + std::to_string(table_offset) +
                                    ", in '" + path + "'");
    }
}

std::uint64_t SaveFile::nbytes() const {
    return file_bytes(table_offset);
}

SaveJob::File::File(const SaveFile& file, const std::shared_ptr<FileOps>& ops)
    : spec(file),
      output(ops, file.path, file.nbytes()),
      checksums(divide_up(file.table_offset, kBlockBytes)),
      // The last is the one that the table begins in. Should the table not fit there, it goes on
      // through that segment's memory, so no file ever waits with more than one segment in hand.
      segments(file.table_offset / kSegmentBytes + 1),
      unsummed(segments - 1),
      unwritten(segments) {}

SaveJob::SaveJob(const std::vector<SaveFile>& files, std::vector<std::string> sync_directories,
                 std::uint64_t order, std::shared_ptr<Window> window, std::shared_ptr<FileOps> ops,
                 Fences fences, std::shared_ptr<ExpectedBytes> expected, Output output)
    : name_(name_of(files, sync_directories)),
      order_(order),
      window_(std::move(window)),
      ops_(std::move(ops)),
      expected_(indexed(std::move(expected))),
      output_(output),
      fences_(std::move(fences)),
      directories_(std::move(sync_directories)),
      submitted_(Clock::now()),
      unfinished_files_(files.size()) {
    for (const SaveFile& file : files) {
        files_.push_back(std::make_unique<File>(file, ops_));
        for (const Region& region : file.content->regions()) {
            unread_[region.group] += region.nbytes();
            unqueued_[region.group] += region.nbytes();
        }
        unread_total_ += file.content->nbytes();
    }
    if (unread_total_ == 0) read_at_ = submitted_;
}

bool SaveJob::wait_read(Group group, Clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline, [&] {
        if (fault_) return reading_ == 0;
        if (group == kEveryGroup) return unread_total_ == 0;
        const auto unread = unread_.find(group);
        return unread == unread_.end() || unread->second == 0;
    });
}

bool SaveJob::wait_queued(Group group, Clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline, [&] {
        if (fault_) return reading_ == 0;
        const auto unqueued = unqueued_.find(group);
        return unqueued == unqueued_.end() || unqueued->second == 0;
    });
}

Fences SaveJob::events(Group group) const {
    const std::scoped_lock lock(mutex_);
    Fences events;
    for (const auto& [key, event] : events_) {
        if (key.first == group) events.push_back(event);
    }
    return events;
}

bool SaveJob::wait(Clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline, [&] { return done_; });
}

void SaveJob::wait_not_reading() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reading_ == 0; });
}

bool SaveJob::all_read() const {
    const std::scoped_lock lock(mutex_);
    return unread_total_ == 0;
}

bool SaveJob::done() const {
    const std::scoped_lock lock(mutex_);
    return done_;
}

std::optional<Fault> SaveJob::fault() const {
    const std::scoped_lock lock(mutex_);
    return fault_;
}

std::optional<ExpectedBytes::Difference> SaveJob::difference() const {
    const std::scoped_lock lock(mutex_);
    return difference_;
}

bool SaveJob::direct() const {
    return std::ranges::all_of(files_, [](const auto& file) { return file->output.direct(); });
}

double SaveJob::read_seconds() const {
    const std::scoped_lock lock(mutex_);
    if (unread_total_ != 0) return 0;
    return seconds_between(std::max(submitted_, window_->opened_at()), read_at_);
}

double SaveJob::total_seconds() const {
    const std::scoped_lock lock(mutex_);
    if (!done_ || fault_) return 0;
    return seconds_between(std::max(submitted_, window_->opened_at()), durable_at_);
}

double SaveJob::cache_seconds() const {
    return std::chrono::duration<double>(Clock::duration(waited_)).count();
}

const std::vector<std::uint32_t>& SaveJob::checksums(std::size_t file) const {
    const std::scoped_lock lock(mutex_);
    if (!done_ || fault_ || file >= files_.size()) {
        throw std::invalid_argument("the save has no checksums of file=" + std::to_string(file));
    }
    return files_[file]->checksums;
}

bool SaveJob::is_last(const Unit& unit) const {
    return unit.segment + 1 == files_[unit.file]->segments;
}

std::optional<SaveJob::Taken> SaveJob::take_unit() {
    const std::scoped_lock lock(mutex_);
    if (fault_ || next_.file == files_.size()) return std::nullopt;
    const Unit unit = next_;
    next_ = is_last(unit) ? Unit{unit.file + 1, 0} : Unit{unit.file, unit.segment + 1};
    ++reading_;
    return Taken{.unit = unit, .last = next_.file == files_.size()};
}

Result<SaveJob::Sources> SaveJob::gather(const Unit& unit, std::byte* memory) {
    const SaveFile& spec = files_[unit.file]->spec;
    const std::uint64_t begin = unit.segment * kSegmentBytes;
    const Range part{.begin = begin, .end = std::min(begin + kSegmentBytes, spec.table_offset)};
    int error = ops_->gather_begins().error;
    if (error == 0) {
        auto filled = spec.content->fill(part, memory);
        Sources sources;
        spec.content->list(Direction::kGather, part, memory, sources.work);
        const SysResult watched = ops_->gather_ended();
        error = filled.error != 0 ? filled.error : watched.error;
        if (error == 0) {
            auto same = compare(unit, filled.unstable);
            if (!same.ok()) return std::move(same).fault();
            sources.groups = std::move(filled.groups);
            return sources;
        }
    }
    const std::scoped_lock lock(mutex_);  // `place` may give it another path
    return Fault{.kind = error == EFAULT ? FaultKind::kLost : FaultKind::kIo,
                 .error = error,
                 .path = spec.is_written() ? spec.path : name_,
                 .offset = begin,
                 .operation = "copy",
                 .detail = {}};
}

/// Comes before what was read is counted: a group counts as read only if it was as expected.
Status SaveJob::compare(const Unit& unit, std::span<const DeviceCopy> copies) {
    if (!expected_) return {};
    const auto difference = expected_->differing(copies);
    if (!difference) return {};
    const SaveFile& spec = files_[unit.file]->spec;
    const std::scoped_lock lock(mutex_);
    if (!fault_) difference_ = difference;
    return Fault{.kind = FaultKind::kTorn,
                 .path = spec.is_written() ? spec.path : name_,
                 .offset = unit.segment * kSegmentBytes,
                 .operation = "copy",
                 .detail = {}};
}

SaveJob::Gathered SaveJob::read(const Unit& unit, Lease memory) {
    Result<Sources> sources = Sources();
    std::exception_ptr error;
    try {
        sources = gather(unit, memory.data());
    } catch (...) {
        error = std::current_exception();  // out of memory: the count below must still be right
    }
    ReadUnit read{.unit = unit, .memory = std::move(memory)};
    Passed passed;
    const std::scoped_lock lock(mutex_);
    if (sources.ok()) {
        for (const auto& [group, nbytes] : sources->groups) unqueued_[group] -= nbytes;
        count_read(sources->groups, passed);
    }
    changed_.notify_all();
    if (sources.ok() && !fault_ && !sources->work.empty()) {
        DeviceRead unread{.read = std::move(read), .work = std::move(sources->work)};
        return {.writable = {}, .unread = std::move(unread), .status = {}};
    }
    --reading_;
    if (error) std::rethrow_exception(error);
    if (!sources.ok()) {
        return {.writable = {}, .unread = {}, .status = std::move(sources).fault()};
    }
    if (fault_) return {};
    return {.writable = hand_out(std::move(read)), .unread = {}, .status = {}};
}

void SaveJob::count_read(const std::vector<GroupBytes>& groups, Passed& passed) {
    for (const auto& [group, nbytes] : groups) {
        unread_[group] -= nbytes;
        unread_total_ -= nbytes;
        bytes_read_ += nbytes;
    }
    if (unread_total_ > 0 || groups.empty()) return;
    read_at_ = Clock::now();
    // No stream has to wait any more. (None is enqueued, either: what is enqueued is not read yet.)
    passed.events.swap(events_);
    passed.fences = fences_.take_all();
}

std::optional<ReadUnit> SaveJob::hand_out(ReadUnit read) {
    File& file = *files_[read.unit.file];
    if (is_last(read.unit) && file.unsummed > 0) {
        file.last = std::move(read.memory);
        return std::nullopt;
    }
    return read;
}

void SaveJob::queued(const std::vector<GroupBytes>& groups, const DeviceLane::Events& events) {
    if (std::ranges::none_of(events, [](const auto& each) { return each != nullptr; })) {
        return;  // the job is about to fail
    }
    Fences passed;  // destroyed after the lock
    passed.reserve(groups.size() * events.size());
    const std::scoped_lock lock(mutex_);
    for (const auto& [group, nbytes] : groups) {
        unqueued_[group] -= nbytes;
        for (const auto& event : events) {
            if (event) passed.push_back(std::exchange(events_[{group, event->stream()}], event));
        }
    }
    changed_.notify_all();
}

SaveJob::Gathered SaveJob::end_read(DeviceRead read, bool failed) {
    Status same;
    if (!failed) {
        for (const auto& [device, work] : read.work) {
            if (same.ok()) same = compare(read.read.unit, work.copies);
        }
    }
    Passed passed;
    const std::scoped_lock lock(mutex_);
    --reading_;
    if (!failed && same.ok()) {
        for (const auto& [device, work] : read.work) count_read(work.groups, passed);
    }
    changed_.notify_all();
    if (failed || !same.ok() || fault_) {
        return {.writable = {}, .unread = {}, .status = std::move(same)};
    }
    return {.writable = hand_out(std::move(read.read)), .unread = {}, .status = {}};
}

std::optional<ReadUnit> SaveJob::sum(const ReadUnit& read) {
    File& file = *files_[read.unit.file];
    std::uint64_t offset = read.unit.segment * kSegmentBytes;
    const std::uint64_t end = std::min(offset + kSegmentBytes, file.spec.table_offset);
    const std::byte* block = read.memory.data();
    while (offset < end) {
        const std::uint64_t size = std::min(kBlockBytes, end - offset);
        file.checksums[offset / kBlockBytes] = crc32c({block, size});
        offset += size;
        block += size;
    }
    if (is_last(read.unit)) return std::nullopt;
    const std::scoped_lock lock(mutex_);
    --file.unsummed;
    if (file.unsummed > 0 || !file.last) return std::nullopt;
    return ReadUnit{.unit = {read.unit.file, file.segments - 1}, .memory = std::move(file.last)};
}

std::uint64_t SaveJob::nbytes_of(const Unit& unit) const {
    const std::uint64_t begin = unit.segment * kSegmentBytes;
    return std::min(kSegmentBytes, files_[unit.file]->spec.table_offset - begin);
}

bool SaveJob::fails_before(Clock::time_point time) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, time, [&] { return fault_.has_value(); });
}

Status SaveJob::write(const ReadUnit& read) {
    File& file = *files_[read.unit.file];
    if (is_last(read.unit)) return write_table(file, read.memory.data());
    auto written =
        file.output.write({read.memory.data(), kSegmentBytes}, read.unit.segment * kSegmentBytes);
    if (written.ok()) *bytes_written_ += kSegmentBytes;
    return written;
}

Status SaveJob::write_table(File& file, std::byte* memory) {
    const auto table = table_of(file.checksums);
    auto words = std::as_bytes(std::span(table));
    std::uint64_t offset = (file.segments - 1) * kSegmentBytes;
    std::uint64_t filled = file.spec.table_offset - offset;  // the stream's last bytes are there
    while (true) {
        const std::uint64_t size = std::min<std::uint64_t>(words.size(), kSegmentBytes - filled);
        std::memcpy(memory + filled, words.data(), size);
        filled += size;
        words = words.subspan(size);
        const std::uint64_t padded = round_up(filled, kDirectAlignment);
        std::memset(memory + filled, 0, padded - filled);
        auto written = file.output.write({memory, padded}, offset);
        if (!written.ok()) return written;
        *bytes_written_ += filled;
        if (words.empty()) return {};
        offset += kSegmentBytes;
        filled = 0;
    }
}

bool SaveJob::unit_written(std::size_t file) {
    const std::scoped_lock lock(mutex_);
    return --files_[file]->unwritten == 0;
}

bool SaveJob::file_finished() {
    const std::scoped_lock lock(mutex_);
    return --unfinished_files_ == 0;
}

Status SaveJob::sync_directories() {
    for (const std::string& directory : directories_) {
        if (auto synced = sync_directory(*ops_, directory); !synced.ok()) return synced;
    }
    return {};
}

void SaveJob::succeed() {
    const std::scoped_lock lock(mutex_);
    if (fault_) return;
    durable_at_ = Clock::now();
    done_ = true;
    changed_.notify_all();
}

bool SaveJob::fail(Fault fault) {
    const std::scoped_lock lock(mutex_);
    if (fault_ || done_) return false;
    fault_ = std::move(fault);
    failed_ = true;
    for (const auto& file : files_) {
        file->last.release();
        file->pieces.clear();
        file->output.cancel();
    }
    changed_.notify_all();
    return true;
}

void SaveJob::pin() {
    const std::scoped_lock lock(mutex_);
    ++pins_;
}

void SaveJob::unpin() {
    {
        const std::scoped_lock lock(mutex_);
        if (--pins_ > 0 || !fault_ || done_ || ending_) return;
        ending_ = true;
    }
    // No other thread is at work on the job, and none will be: a failed job gives out no units.
    for (const auto& file : files_) file->output.abandon();
    const std::scoped_lock lock(mutex_);
    done_ = true;
    changed_.notify_all();
}

}  // namespace datastates
