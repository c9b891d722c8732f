// What only streamed jobs do: hand out pieces of files, in the order of their bytes.

#include <algorithm>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "pipeline/save_job.h"

namespace datastates {

void SaveJob::offer(ReadUnit read) {
    const auto& [unit, memory] = read;
    File& file = *files_[unit.file];
    std::vector<std::shared_ptr<Piece>> pieces;  // if the job has failed, given back after the lock
    if (is_last(unit)) {
        pieces = last_pieces(file, std::move(read.memory));
    } else {
        const std::span<const std::byte> bytes(memory.data(), kSegmentBytes);
        pieces.push_back(std::make_shared<Piece>(std::move(read.memory), bytes));
    }
    const std::scoped_lock lock(mutex_);
    if (fault_) return;
    std::uint64_t place = unit.segment;
    for (auto& piece : pieces) file.pieces.emplace(place++, std::move(piece));
    changed_.notify_all();
}

/// The table goes after the stream's last bytes. What does not fit there needs no segment: the
/// pieces are cut from the table itself.
std::vector<std::shared_ptr<Piece>> SaveJob::last_pieces(const File& file, Lease memory) {
    const auto table = std::make_shared<const std::vector<std::uint32_t>>(table_of(file.checksums));
    auto words = std::as_bytes(std::span(*table));
    const std::uint64_t filled = file.spec.table_offset % kSegmentBytes;
    const std::uint64_t fits = std::min<std::uint64_t>(words.size(), kSegmentBytes - filled);
    std::memcpy(memory.data() + filled, words.data(), fits);
    words = words.subspan(fits);
    const std::span<const std::byte> bytes(memory.data(), filled + fits);
    std::vector<std::shared_ptr<Piece>> pieces;
    pieces.push_back(std::make_shared<Piece>(std::move(memory), bytes));
    while (!words.empty()) {
        const auto part = words.first(std::min<std::uint64_t>(words.size(), kSegmentBytes));
        words = words.subspan(part.size());
        pieces.push_back(std::make_shared<Piece>(Lease(), part));
        pieces.back()->table = table;
    }
    return pieces;
}

SaveJob::File& SaveJob::streamed_file(std::size_t file) const {
    if (!streamed()) throw std::invalid_argument("the save writes its files itself");
    if (file >= files_.size()) {
        throw std::invalid_argument("file=" + std::to_string(file) + " is not one of the save's " +
                                    std::to_string(files_.size()));
    }
    return *files_[file];
}

std::optional<Result<std::shared_ptr<Piece>>> SaveJob::take(std::size_t file,
                                                            Clock::time_point deadline) {
    File& of = streamed_file(file);
    const std::uint64_t count = divide_up(of.spec.nbytes(), kSegmentBytes);
    std::unique_lock lock(mutex_);
    const bool ready = changed_.wait_until(lock, deadline, [&] {
        return fault_ || of.taken == count || of.pieces.contains(of.taken);
    });
    if (!ready) return std::nullopt;
    if (fault_) return Result<std::shared_ptr<Piece>>(Fault(*fault_));
    if (of.taken == count) return Result(std::shared_ptr<Piece>());
    auto piece = std::move(of.pieces.extract(of.taken).mapped());
    ++of.taken;
    piece->written = bytes_written_;
    return Result(std::move(piece));
}

void SaveJob::stored(std::size_t file) {
    File& of = streamed_file(file);
    {
        const std::scoped_lock lock(mutex_);
        if (fault_) return;
        if (of.taken < divide_up(of.spec.nbytes(), kSegmentBytes)) {
            throw std::invalid_argument("'" + of.spec.path + "' was not taken to its end");
        }
        if (of.stored) throw std::invalid_argument("'" + of.spec.path + "' was stored before");
        of.stored = true;
    }
    if (file_finished()) succeed();
}

}  // namespace datastates
