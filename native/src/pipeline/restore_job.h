// What one restore reads, and how far it has come. Passive: RestorePipeline's threads act.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
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
    bool table = false;  ///< a part of the checksum table, and perhaps some bytes before it
    Range bytes;         ///< of the file, at most a segment; if not of the table, whole blocks
};

/// A step whose bytes the caller fetches.
struct Fetch {
    RestoreStep step;
    std::string path;
};

class RestoreJob {
  public:
    /// Who reads the files.
    enum class Input : std::uint8_t {
        kFiles,   ///< the pipeline's threads
        kStreams  ///< the caller: their paths are only names
    };

    /// Copies to devices come after `fences`.
    RestoreJob(const std::vector<RestoreFile>& files, const std::shared_ptr<FileOps>& ops,
               Fences fences, Input input = Input::kFiles);

    // --- for the handle -------------------------------------------------------------------

    /// Until all is scattered, or the job has failed and writes to its memory no more: a thread may
    /// still be in a file operation, and touches none of it when that returns.
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
    /// Reads the bytes of a step into the segment at `memory`; with a file's first, opens it.
    Status read(const RestoreStep& step, std::byte* memory);
    /// Whether the page cache has had all that was read of the step's file.
    [[nodiscard]] bool from_page_cache(const RestoreStep& step) const {
        return files_[step.file]->input.is_cached();
    }
    /// Verifies the bytes of a step, which are at `memory`, and scatters them.
    Result<Next> use(const RestoreStep& step, std::byte* memory);

    // Of a streamed job: its steps wait here, each with a pin, until they are fetched.

    [[nodiscard]] bool streamed() const { return input_ == Input::kStreams; }
    void queue(const std::vector<RestoreStep>& steps);
    struct NextFetch {
        bool ended = false;  ///< the job is done, or has failed: there will be no more
        std::optional<Fetch> fetch;
    };
    /// Neither, if `deadline` passes first.
    NextFetch take_fetch(Clock::time_point deadline);
    /// It was not begun.
    void put_back(const Fetch& fetch);
    /// The caller has fetched a step, and uses it under a pin of its own. False if the job has
    /// failed.
    bool end_fetch();

    /// What copies to devices come after.
    [[nodiscard]] JobFences& fences() { return fences_; }

    /// The path of its first file.
    [[nodiscard]] const std::string& name() const { return name_; }
    [[nodiscard]] bool failed() const { return failed_; }
    /// Whether no thread is at work on it any more.
    [[nodiscard]] bool done() const;

    /// The first fault wins. Returns whether it was this one.
    bool fail(Fault fault);

    /// Keeps the job at work: it is done when the last pin goes. Every step, queued or under way,
    /// has one.
    using Pin = JobPin<RestoreJob>;

    struct EndWriting {
        void operator()(RestoreJob* job) const { job->end_writing(); }
    };
    /// Writes to the job's memory: who waits for the job waits until it goes. It goes before the
    /// pin of its thread.
    using Writing = std::unique_ptr<RestoreJob, EndWriting>;
    /// Null if the job has failed: its memory may be gone.
    [[nodiscard]] Writing begin_writing();

  private:
    friend Pin;

    struct File {
        File(const RestoreFile& file, const std::shared_ptr<FileOps>& ops)
            : spec(file), input(ops, file.path) {}

        RestoreFile spec;
        InputFile input;
        std::vector<std::uint32_t> checksums;  // written by the table's steps, then only read
    };

    [[nodiscard]] RestoreStep table_step(std::size_t file, std::uint64_t begin) const;
    Result<std::vector<RestoreStep>> take_table(const RestoreStep& step, const std::byte* memory);
    static Result<std::map<int, DeviceWork>> scatter(File& file, Range blocks, std::byte* memory);
    [[nodiscard]] std::vector<RestoreStep> plan_reads(std::size_t index, const File& file) const;
    void pin();
    void unpin();
    void end_writing();

    const std::string name_;
    const Input input_;
    JobFences fences_;
    std::vector<std::unique_ptr<File>> files_;  // until the last pin goes
    std::atomic<bool> failed_ = false;
    std::atomic<std::uint64_t> bytes_read_ = 0;

    mutable std::mutex mutex_;         // guards what follows
    std::condition_variable changed_;  // any of it
    std::size_t pins_ = 0;
    std::size_t writing_ = 0;
    std::deque<RestoreStep> unfetched_;
    std::size_t fetching_ = 0;  // steps that the caller has taken
    std::optional<Fault> fault_;
    bool ending_ = false;  // the last pin went
    bool done_ = false;
};

}  // namespace datastates
