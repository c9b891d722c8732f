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
                       Fences fences)
    : fences_(std::move(fences)) {
    for (const RestoreFile& file : files) files_.push_back(std::make_unique<File>(file, ops));
}

bool RestoreJob::wait(Clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline, [&] { return done_; });
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
    return true;
}

void RestoreJob::give_up(Fault fault) {
    const std::scoped_lock lock(mutex_);
    leave_open_ = true;
    if (fault_ && !done_) replace_end(*fault_, std::move(fault));
}

void RestoreJob::lose_pin() {
    const std::scoped_lock lock(mutex_);
    if (!ending_ && --pins_ > 0) return;
    ending_ = true;  // or it was lost while it closed the files
    done_ = true;
    changed_.notify_all();
}

std::vector<RestoreStep> RestoreJob::first_steps() const {
    std::vector<RestoreStep> steps;
    steps.reserve(files_.size());
    for (std::size_t i = 0; i < files_.size(); ++i) {
        steps.push_back({.file = i, .open = true, .blocks = {}});
    }
    return steps;
}

Result<RestoreJob::Next> RestoreJob::run(const RestoreStep& step, std::byte* memory) {
    File& file = *files_[step.file];
    if (!step.open) {
        auto work = scatter(file, step.blocks, memory);
        if (!work.ok()) return std::move(work).fault();
        return Next{.steps = {}, .work = *std::move(work)};
    }
    auto opened = file.input.open(file.spec.nbytes);
    if (opened.ok()) opened = read_table(file, memory);
    if (!opened.ok()) return std::move(opened).fault();
    return Next{.steps = plan_reads(step.file, file), .work = {}};
}

Status RestoreJob::read_table(File& file, std::byte* memory) {
    const RestoreFile& spec = file.spec;
    std::vector<std::uint32_t> table((spec.nbytes - spec.table_offset) / sizeof(std::uint32_t));
    auto words = std::as_writable_bytes(std::span(table));
    std::uint64_t offset = spec.table_offset;
    while (!words.empty()) {
        const std::uint64_t begin = offset / kDirectAlignment * kDirectAlignment;
        const std::uint64_t end = std::min(begin + kSegmentBytes, spec.nbytes);
        auto read = file.input.read({memory, kSegmentBytes}, begin, end - begin);
        if (!read.ok()) return read;
        bytes_read_ += end - begin;
        const std::uint64_t size = end - offset;
        std::memcpy(words.data(), memory + (offset - begin), size);
        words = words.subspan(size);
        offset = end;
    }
    const std::uint32_t stored = table.back();
    table.pop_back();
    if (crc32c(std::as_bytes(std::span(table))) != stored) {
        return corrupt(spec, spec.table_offset,
                       "the checksum table does not match its own checksum");
    }
    file.checksums = std::move(table);
    return {};
}

std::vector<RestoreStep> RestoreJob::plan_reads(std::size_t index, const File& file) {
    const StreamContent& content = *file.spec.content;
    std::vector<RestoreStep> steps;
    Range run;  // needed blocks that follow each other, so far
    const auto end_run = [&] {
        if (run.size() > 0) steps.push_back({.file = index, .open = false, .blocks = run});
        run = {};
    };
    for (std::uint64_t at = 0; at < content.end(); at += kBlockBytes) {
        const Range block{.begin = at, .end = std::min(at + kBlockBytes, file.spec.table_offset)};
        if (!content.touches(block)) {
            end_run();
            continue;
        }
        run = {.begin = run.size() > 0 ? run.begin : at, .end = block.end};
        if (run.size() == kSegmentBytes) end_run();
    }
    end_run();
    return steps;
}

Result<std::map<int, DeviceWork>> RestoreJob::scatter(File& file, Range blocks, std::byte* memory) {
    auto read = file.input.read({memory, kSegmentBytes}, blocks.begin, blocks.size());
    if (!read.ok()) return std::move(read).fault();
    bytes_read_ += blocks.size();
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

void RestoreJob::pin() {
    const std::scoped_lock lock(mutex_);
    ++pins_;
}

void RestoreJob::unpin() {
    {
        const std::scoped_lock lock(mutex_);
        if (--pins_ > 0 || ending_) return;
        ending_ = true;
        if (leave_open_) {
            for (const auto& file : files_) file->input.leave_open();
        }
    }
    files_.clear();  // closes them; a thread that would use them has a pin, or was given up
    const std::scoped_lock lock(mutex_);
    done_ = true;
    changed_.notify_all();
}

}  // namespace datastates
