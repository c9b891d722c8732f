// One rank's files of one save, and how far they have come. Passive: SavePipeline's threads act.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/immovable.h"
#include "base/sizes.h"
#include "base/status.h"
#include "device/device_lane.h"
#include "files/output_file.h"
#include "memory/expected_bytes.h"
#include "memory/host_cache.h"
#include "memory/transfer.h"
#include "pipeline/pin.h"
#include "pipeline/window.h"

namespace datastates {

/// A file to write: `table_offset` bytes of stream, then the table of its blocks' checksums.
/// Without a path, its stream is read and summed, and not written.
struct SaveFile {
    /// Throws std::invalid_argument if the arguments make no file.
    SaveFile(std::string file_path, std::uint64_t offset, const Transfer& transfer);

    std::string path;
    std::uint64_t table_offset = 0;
    std::shared_ptr<const StreamContent> content;

    [[nodiscard]] std::uint64_t nbytes() const;
    [[nodiscard]] bool is_written() const { return !path.empty(); }
};

/// Throws std::invalid_argument for a path that is named twice.
void check_distinct(const std::vector<std::string>& paths);

/// The table at the end of a file: its blocks' checksums, and then their own.
std::vector<std::uint32_t> table_of(std::vector<std::uint32_t> checksums);

/// Size of a file, its checksum table included.
std::uint64_t file_bytes(std::uint64_t table_offset);

/// One segment of one file of a job.
struct Unit {
    std::size_t file = 0;
    std::uint64_t segment = 0;
};

/// A unit that has been read and may be written.
struct ReadUnit {
    Unit unit;
    Lease memory;
};

/// What becomes of what is read.
enum class Output : std::uint8_t {
    kFiles,    ///< files that the pipeline writes
    kStreams,  ///< pieces of files, which the caller takes and sends
};

/// Up to a segment of a streamed file. When it goes, its memory goes back to the host cache, and
/// its bytes count as written. It needs neither its job nor the engine's threads.
struct Piece : Immovable {
    Piece(Lease leased, std::span<const std::byte> content)
        : memory(std::move(leased)), bytes(content) {}
    ~Piece() {
        if (written) *written += bytes.size();
    }

    Lease memory;
    std::shared_ptr<const std::vector<std::uint32_t>> table;  ///< has the bytes if `memory` has not
    std::span<const std::byte> bytes;
    std::shared_ptr<std::atomic<std::uint64_t>> written;  ///< set when it is taken
};

/// A unit of which devices have some bytes: what they have to copy, by device.
struct DeviceRead {
    ReadUnit read;
    std::map<int, DeviceWork> work;
};

class SaveJob {
  public:
    /// The directories are synced in this order, when all files are. What is read must be as
    /// `expected`.
    SaveJob(const std::vector<SaveFile>& files, std::vector<std::string> sync_directories,
            std::uint64_t order, std::shared_ptr<Window> window, std::shared_ptr<FileOps> ops,
            Fences fences = {}, std::shared_ptr<ExpectedBytes> expected = nullptr,
            Output output = Output::kFiles);
    // --- for the handle -------------------------------------------------------------------

    /// Until all regions of `group` have been read, or the job has failed and reads no more.
    bool wait_read(Group group, Clock::time_point deadline);
    /// Until all regions of `group` have been read, or will have been before what `events` say; or
    /// the job has failed and reads no more.
    bool wait_queued(Group group, Clock::time_point deadline);
    /// After `wait_queued`: what streams that change the group have to wait for; nothing if all is
    /// read.
    [[nodiscard]] Fences events(Group group) const;
    /// Until durable, or failed and no thread is at work on it any more.
    bool wait(Clock::time_point deadline);
    /// Until no thread reads the job's sources. Only after a failure, or when all is read.
    void wait_not_reading();

    [[nodiscard]] bool all_read() const;
    [[nodiscard]] bool done() const;
    [[nodiscard]] std::optional<Fault> fault() const;
    /// What a torn job has found.
    [[nodiscard]] std::optional<ExpectedBytes::Difference> difference() const;
    [[nodiscard]] std::uint64_t bytes_read() const { return bytes_read_; }
    [[nodiscard]] std::uint64_t bytes_written() const { return *bytes_written_; }
    [[nodiscard]] bool direct() const;
    [[nodiscard]] double read_seconds() const;
    [[nodiscard]] double total_seconds() const;
    /// How long copy threads have waited for room in the host cache, all of them together.
    [[nodiscard]] double cache_seconds() const;
    /// The checksums of a file's blocks, once the job is done without a fault. Throws
    /// std::invalid_argument before, and for a file that it has not.
    [[nodiscard]] const std::vector<std::uint32_t>& checksums(std::size_t file) const;

    // Of a streamed job. They throw std::invalid_argument for a file that it has not.

    /// The next piece of a file, in the order of its bytes; null after the last, and the fault of a
    /// failed job. None if `deadline` passes first. All pieces but the last are segments.
    std::optional<Result<std::shared_ptr<Piece>>> take(std::size_t file,
                                                       Clock::time_point deadline);
    /// The caller has made a file durable, of which it has taken all pieces: once, or this throws
    /// std::invalid_argument. With its last file, the job is done.
    void stored(std::size_t file);

    // --- for the pipeline -------------------------------------------------------------------

    /// The path of its first file or directory.
    [[nodiscard]] const std::string& name() const { return name_; }
    [[nodiscard]] std::uint64_t order() const { return order_; }
    [[nodiscard]] const std::shared_ptr<Window>& window() const { return window_; }
    [[nodiscard]] std::size_t file_count() const { return files_.size(); }
    [[nodiscard]] bool is_written(std::size_t file) const {
        return files_[file]->spec.is_written();
    }
    [[nodiscard]] bool failed() const { return failed_; }
    [[nodiscard]] bool streamed() const { return output_ == Output::kStreams; }
    [[nodiscard]] bool writes() const { return output_ == Output::kFiles; }

    struct Taken {
        Unit unit;
        bool last = false;
    };
    /// The next unit in file order, which the caller must read; none if the job has failed.
    std::optional<Taken> take_unit();

    struct Gathered {
        std::optional<ReadUnit> writable;
        std::optional<DeviceRead> unread;  ///< the caller has it read, and calls `end_read`
        Status status;                     ///< the job has not failed yet: the caller makes it
    };
    /// Reports that the caller has waited for the memory of a taken unit.
    void waited(Clock::duration time) { waited_ += time.count(); }

    /// Gathers a taken unit into `memory`, and reports it. Returns what may be written now, if any:
    /// the file's last segment waits here for the checksums of those before it.
    Gathered read(const Unit& unit, Lease memory);

    /// What copies by devices come after. The caller has a unit that is not queued yet.
    [[nodiscard]] JobFences& fences() { return fences_; }
    /// Reports that a device will have read these when `events` come (all null: it will not).
    void queued(const std::vector<GroupBytes>& groups, const DeviceLane::Events& events);
    /// Reports that devices have read their part, or `failed`. Returns what may be written now, or
    /// a fault, as `read` does.
    Gathered end_read(DeviceRead read, bool failed);

    Status open_file(std::size_t file) { return files_[file]->output.ensure_open(); }

    /// Sums a unit's blocks. Returns the file's last segment if that was all it waited for.
    std::optional<ReadUnit> sum(const ReadUnit& read);

    /// The bytes of a unit, without the checksum table.
    [[nodiscard]] std::uint64_t nbytes_of(const Unit& unit) const;

    /// Waits until `time`; true immediately if the job has failed before.
    bool fails_before(Clock::time_point time);

    /// Writes a summed unit; with the file's last segment, the checksum table.
    Status write(const ReadUnit& read);

    /// Has a summed unit, with the file's last segment the checksum table, wait for `take`.
    void offer(ReadUnit read);

    /// Reports a written unit. True if it was the file's last.
    bool unit_written(std::size_t file);

    Status finish_file(std::size_t file) { return files_[file]->output.finish(); }
    /// Reports a durable file. True if it was the job's last.
    bool file_finished();
    /// Makes the directories' entries durable.
    Status sync_directories();
    /// Reports that everything is durable.
    void succeed();

    /// The first fault wins. Returns whether it was this one; what waits to be written is dropped.
    bool fail(Fault fault);

    /// Keeps the job at work: a failed job is done when the last pin goes. Every queue entry and
    /// every thread that touches the job's files or sources has one.
    using Pin = JobPin<SaveJob>;

  private:
    friend Pin;

    struct File {
        File(const SaveFile& file, const std::shared_ptr<FileOps>& ops);

        SaveFile spec;
        OutputFile output;
        std::vector<std::uint32_t>
            checksums;               // each written by one thread, before `unsummed` drops
        std::uint64_t segments = 0;  // that pass through the cache: up to the last
        std::uint64_t unsummed = 0;  // segments before the last whose sums are missing
        std::uint64_t unwritten = 0;
        Lease last;  // the last segment, read, while it waits for `unsummed`
        std::map<std::uint64_t, std::shared_ptr<Piece>> pieces;  // to be taken, by their place
        std::uint64_t taken = 0;                                 // pieces
        bool stored = false;
    };

    using Events = std::map<std::pair<Group, StreamHandle>,
                            std::shared_ptr<DeviceEvent>>;  // the last ones

    /// What is not waited for any more. To be destroyed without the lock: that calls the driver,
    /// which may keep its callers waiting.
    struct Passed {
        Events events;
        Fences fences;
    };

    /// Of a unit: what was read, and what devices have to read.
    struct Sources {
        std::vector<GroupBytes> groups;
        std::map<int, DeviceWork> work;
    };

    [[nodiscard]] bool is_last(const Unit& unit) const;
    Result<Sources> gather(const Unit& unit, std::byte* memory);
    Status compare(const Unit& unit, std::span<const DeviceCopy> copies);
    Status write_table(File& file, std::byte* memory);
    static std::vector<std::shared_ptr<Piece>> last_pieces(const File& file, Lease memory);
    [[nodiscard]] File& streamed_file(std::size_t file) const;
    std::optional<ReadUnit> hand_out(ReadUnit read);                         // mutex_ held
    void count_read(const std::vector<GroupBytes>& groups, Passed& passed);  // mutex_ held
    void pin();
    void unpin();

    const std::string name_;
    const std::uint64_t order_;
    const std::shared_ptr<Window> window_;
    const std::shared_ptr<FileOps> ops_;
    const std::shared_ptr<const ExpectedBytes> expected_;  // null: nothing
    const Output output_;
    JobFences fences_;
    const std::vector<std::string> directories_;
    std::vector<std::unique_ptr<File>> files_;
    const Clock::time_point submitted_;

    std::atomic<bool> failed_ = false;
    std::atomic<std::uint64_t> bytes_read_ = 0;
    std::atomic<Clock::rep> waited_ = 0;  // for memory
    const std::shared_ptr<std::atomic<std::uint64_t>> bytes_written_ =
        std::make_shared<std::atomic<std::uint64_t>>(0);  // pieces may outlive the job

    mutable std::mutex mutex_;         // guards what follows, and of File what follows `checksums`
    std::condition_variable changed_;  // any of it
    Unit next_;                        // not yet taken
    std::unordered_map<Group, std::uint64_t> unread_;    // bytes per group
    std::unordered_map<Group, std::uint64_t> unqueued_;  // bytes per group, neither read nor queued
    Events events_;
    std::uint64_t unread_total_ = 0;
    std::size_t reading_ = 0;  // units whose sources threads or devices read now
    std::size_t unfinished_files_ = 0;
    std::size_t pins_ = 0;
    std::optional<Fault> fault_;
    std::optional<ExpectedBytes::Difference> difference_;
    bool ending_ = false;  // it has failed and its last pin went; a late one does not count
    bool done_ = false;
    Clock::time_point read_at_;
    Clock::time_point durable_at_;
};

}  // namespace datastates
