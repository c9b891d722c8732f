#include "pipeline/restore_job.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <span>
#include <stdexcept>
#include <utility>

#include "files/crc32c.h"
#include "pipeline/save_job.h"

namespace datastates {
namespace {

Fault corrupt(const RestoreFile& file, std::uint64_t offset, std::string detail) {
    return {.kind = FaultKind::kCorrupt,
            .error = 0,
            .path = file.path,
            .offset = offset,
            .operation = "checksum",
            .detail = std::move(detail)};
}

}  // namespace

RestoreFile::RestoreFile(std::string file_path, std::uint64_t size, std::uint64_t table,
                         const Transfer& transfer)
    : path(std::move(file_path)), nbytes(size), table_offset(table) {
    const SaveFile same_rules(path, table_offset, transfer);
    content = same_rules.content;
    if (same_rules.nbytes() != nbytes) {
        throw std::invalid_argument("nbytes=" + std::to_string(nbytes) + " is not the " +
                                    std::to_string(same_rules.nbytes()) + " that table_offset=" +
                                    std::to_string(table_offset) + " makes, in '" + path + "'");
    }
    if (content->has_read_only()) {
        throw std::invalid_argument("a read-only buffer cannot be restored into, in '" + path +
                                    "'");
    }
}

RestoreJob::RestoreJob(const std::vector<RestoreFile>& files, const std::shared_ptr<FileOps>& ops,
                       Fences fences, Input input)
    : name_(files.empty() ? "" : files.front().path), input_(input), fences_(std::move(fences)) {
    for (const RestoreFile& file : files) files_.push_back(std::make_unique<File>(file, ops));
}

bool RestoreJob::wait(Clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline,
                               [&] { return done_ || (fault_.has_value() && writing_ == 0); });
}

bool RestoreJob::done() const {
    const std::scoped_lock lock(mutex_);
    return done_;
}

RestoreJob::Writing RestoreJob::begin_writing() {
    const std::scoped_lock lock(mutex_);
    if (fault_) return nullptr;
    ++writing_;
    return Writing(this);
}

void RestoreJob::end_writing() {
    const std::scoped_lock lock(mutex_);
    --writing_;
    changed_.notify_all();
}

std::optional<Fault> RestoreJob::fault() const {
    const std::scoped_lock lock(mutex_);
    return fault_;
}

bool RestoreJob::fail(Fault fault) {
    const std::scoped_lock lock(mutex_);
    if (fault_ || ending_) return false;
    fault_ = std::move(fault);
    failed_ = true;
    // The caller has a pin, so these are not the last. What is being fetched is waited for no more.
    pins_ -= unfetched_.size() + fetching_;
    unfetched_.clear();
    fetching_ = 0;
    changed_.notify_all();
    return true;
}

RestoreStep RestoreJob::table_step(std::size_t file, std::uint64_t begin) const {
    const std::uint64_t end = std::min(begin + kSegmentBytes, files_[file]->spec.nbytes);
    return {.file = file, .table = true, .bytes = {.begin = begin, .end = end}};
}

std::vector<RestoreStep> RestoreJob::first_steps() const {
    std::vector<RestoreStep> steps;
    steps.reserve(files_.size());
    for (std::size_t i = 0; i < files_.size(); ++i) {
        const std::uint64_t offset = files_[i]->spec.table_offset;
        steps.push_back(table_step(i, offset / kDirectAlignment * kDirectAlignment));
    }
    return steps;
}

Status RestoreJob::read(const RestoreStep& step, std::byte* memory) {
    File& file = *files_[step.file];
    if (step.table && step.bytes.begin <= file.spec.table_offset) {
        if (auto opened = file.input.open(file.spec.nbytes); !opened.ok()) return opened;
    }
    return file.input.read({memory, kSegmentBytes}, step.bytes.begin, step.bytes.size());
}

Result<RestoreJob::Next> RestoreJob::use(const RestoreStep& step, std::byte* memory) {
    bytes_read_ += step.bytes.size();
    if (step.table) {
        auto steps = take_table(step, memory);
        if (!steps.ok()) return std::move(steps).fault();
        return Next{.steps = *std::move(steps), .work = {}};
    }
    auto work = scatter(*files_[step.file], step.bytes, memory);
    if (!work.ok()) return std::move(work).fault();
    return Next{.steps = {}, .work = *std::move(work)};
}

/// Returns the table's next step; after the last, those that read the file's blocks.
Result<std::vector<RestoreStep>> RestoreJob::take_table(const RestoreStep& step,
                                                        const std::byte* memory) {
    File& file = *files_[step.file];
    const RestoreFile& spec = file.spec;
    std::vector<std::uint32_t>& table = file.checksums;
    table.resize((spec.nbytes - spec.table_offset) / sizeof(std::uint32_t));
    const std::uint64_t begin = std::max(step.bytes.begin, spec.table_offset);
    std::memcpy(std::as_writable_bytes(std::span(table)).data() + (begin - spec.table_offset),
                memory + (begin - step.bytes.begin), step.bytes.end - begin);
    if (step.bytes.end < spec.nbytes) return std::vector{table_step(step.file, step.bytes.end)};
    const std::uint32_t stored = table.back();
    table.pop_back();
    if (crc32c(std::as_bytes(std::span(table))) != stored) {
        return corrupt(spec, spec.table_offset,
                       "the checksum table does not match its own checksum");
    }
    return plan_reads(step.file, file);
}

std::vector<RestoreStep> RestoreJob::plan_reads(std::size_t index, const File& file) const {
    const StreamContent& content = *file.spec.content;
    std::vector<RestoreStep> steps;
    // From the page cache block by block: what was just read is still in the processor's cache when
    // it is verified and scattered.
    const std::uint64_t limit = !streamed() && file.input.is_cached() ? kBlockBytes : kSegmentBytes;
    Range run;  // needed blocks that follow each other, so far
    const auto end_run = [&] {
        if (run.size() > 0) steps.push_back({.file = index, .table = false, .bytes = run});
        run = {};
    };
    for (std::uint64_t at = 0; at < content.end(); at += kBlockBytes) {
        const Range block{.begin = at, .end = std::min(at + kBlockBytes, file.spec.table_offset)};
        if (!content.touches(block)) {
            end_run();
            continue;
        }
        run = {.begin = run.size() > 0 ? run.begin : at, .end = block.end};
        if (run.size() >= limit) end_run();
    }
    end_run();
    return steps;
}

Result<std::map<int, DeviceWork>> RestoreJob::scatter(File& file, Range blocks, std::byte* memory) {
    std::map<int, DeviceWork> work;
    for (std::uint64_t at = blocks.begin; at < blocks.end; at += kBlockBytes) {
        const Range block{.begin = at, .end = std::min(at + kBlockBytes, blocks.end)};
        std::byte* const bytes = memory + (at - blocks.begin);
        if (crc32c({bytes, block.size()}) != file.checksums[at / kBlockBytes]) {
            return corrupt(file.spec, at, "the block does not match its checksum");
        }
        file.spec.content->copy(Direction::kScatter, block, bytes);
        file.spec.content->list(Direction::kScatter, block, bytes, work);
    }
    return work;
}

void RestoreJob::queue(const std::vector<RestoreStep>& steps) {
    const std::scoped_lock lock(mutex_);
    if (fault_) return;
    unfetched_.insert(unfetched_.end(), steps.begin(), steps.end());
    pins_ += steps.size();
    changed_.notify_all();
}

RestoreJob::NextFetch RestoreJob::take_fetch(Clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline, [&] { return fault_ || done_ || !unfetched_.empty(); });
    if (fault_ || done_) return {.ended = true, .fetch = {}};
    if (unfetched_.empty()) return {};
    // Its pin keeps the files. They may go without it as soon as the job fails, which needs mutex_.
    const RestoreStep step = unfetched_.front();
    NextFetch next{.fetch = Fetch{.step = step, .path = files_[step.file]->spec.path}};
    unfetched_.pop_front();
    ++fetching_;
    return next;
}

void RestoreJob::put_back(const Fetch& fetch) {
    const std::scoped_lock lock(mutex_);
    if (fault_) return;
    unfetched_.push_front(fetch.step);
    --fetching_;
    changed_.notify_all();
}

bool RestoreJob::end_fetch() {
    const std::scoped_lock lock(mutex_);
    if (fault_) return false;
    --fetching_;
    --pins_;
    return true;
}

void RestoreJob::pin() {
    const std::scoped_lock lock(mutex_);
    ++pins_;
}

void RestoreJob::unpin() {
    {
        const std::scoped_lock lock(mutex_);
        if (--pins_ > 0 || ending_) return;
        ending_ = true;
    }
    files_.clear();  // closes them; a thread that would use them has a pin
    const std::scoped_lock lock(mutex_);
    done_ = true;
    changed_.notify_all();
}

}  // namespace datastates
