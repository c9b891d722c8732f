// What one restore reads, and how far it has come. Passive: RestorePipeline's threads act.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/sizes.h"
#include "base/status.h"
#include "device/devices.h"
#include "files/input_file.h"
#include "memory/transfer.h"
#include "pipeline/pin.h"
#include "pipeline/save_job.h"
#include "pipeline/window.h"

namespace datastates {

/// Regions of one file, to be scattered into memory.
struct RestoreFile {
    /// Throws std::invalid_argument if the arguments do not fit together.
    RestoreFile(std::string file_path, std::uint64_t size, std::uint64_t table,
                const Transfer& transfer);

    std::string path;
    std::uint64_t nbytes = 0;
    std::uint64_t table_offset = 0;
    std::shared_ptr<const StreamContent> content;
};

/// A step that needs one segment of memory.
struct RestoreStep {
    std::size_t file = 0;
    bool open = false;  ///< open the file and read its checksums; else: read `blocks`
    Range blocks;       ///< bytes of the file, whole blocks, at most a segment
};

class RestoreJob {
  public:
    /// Copies to devices come after `fences`.
    RestoreJob(const std::vector<RestoreFile>& files, const std::shared_ptr<FileOps>& ops,
               Fences fences);

    // --- for the handle -------------------------------------------------------------------

    /// Until all is scattered, or the job has failed and no thread is at work on it any more, but
    /// for those that were given up: they write no more.
    bool wait(Clock::time_point deadline);
    [[nodiscard]] std::optional<Fault> fault() const;
    [[nodiscard]] std::uint64_t bytes_read() const { return bytes_read_; }

    // --- for the pipeline -------------------------------------------------------------------

    /// The steps to begin with: one per file.
    [[nodiscard]] std::vector<RestoreStep> first_steps() const;

    /// What follows from a step.
    struct Next {
        std::vector<RestoreStep> steps;
        std::map<int, DeviceWork> work;  ///< what devices have to copy from the segment
    };
    /// Takes a step, with the segment at `memory`.
    Result<Next> run(const RestoreStep& step, std::byte* memory);

    /// What copies to devices come after.
    [[nodiscard]] JobFences& fences() { return fences_; }

    [[nodiscard]] bool failed() const { return failed_; }

    /// The first fault wins. Returns whether it was this one.
    bool fail(Fault fault);

    /// A file operation never returns: `fault` is why a job ends that was cancelled or shut down,
    /// and its files are not closed any more. The caller fails it.
    void give_up(Fault fault);

    /// A pin never goes: the thread that has it was given up.
    void lose_pin();

    /// Keeps the job at work: it is done when the last pin goes. Every step, queued or under way,
    /// has one.
    using Pin = JobPin<RestoreJob>;

  private:
    friend Pin;

    struct File {
        File(const RestoreFile& file, const std::shared_ptr<FileOps>& ops)
            : spec(file), input(ops, file.path) {}

        RestoreFile spec;
        InputFile input;
        std::vector<std::uint32_t> checksums;  // written by the opening step, then only read
    };

    Status read_table(File& file, std::byte* memory);
    Result<std::map<int, DeviceWork>> scatter(File& file, Range blocks, std::byte* memory);
    static std::vector<RestoreStep> plan_reads(std::size_t index, const File& file);
    void pin();
    void unpin();

    JobFences fences_;
    std::vector<std::unique_ptr<File>> files_;  // until the last pin goes
    std::atomic<bool> failed_ = false;
    std::atomic<std::uint64_t> bytes_read_ = 0;

    mutable std::mutex mutex_;         // guards what follows
    std::condition_variable changed_;  // done_
    std::size_t pins_ = 0;
    std::optional<Fault> fault_;
    bool leave_open_ = false;
    bool ending_ = false;  // the last pin went
    bool done_ = false;
};

}  // namespace datastates
