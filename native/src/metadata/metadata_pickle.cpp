// The opcodes are those that Python's pickler would write for the objects, with two exceptions:
// only what is referred to again is memoized, and torch.Sizes with the same values are one object.

#include "metadata/metadata_pickle.h"

#include <algorithm>
#include <array>
#include <bit>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "metadata/pickle_opcodes.h"
#include "metadata/pickle_output.h"

namespace datastates {
namespace {

constexpr std::int64_t kMaxDims = 64;  // as in torch

// At most, in bytes; rounded up.
constexpr std::size_t kGetBytes = 5;
constexpr std::size_t kIntBytes = 11;
constexpr std::size_t kSizeBytes = kGetBytes + 8;          // and its integers
constexpr std::size_t kEntryBytes = (8 * kGetBytes) + 16;  // neither size nor chunks
constexpr std::size_t kChunkBytes = (4 * kGetBytes) + 12;  // without its sizes
constexpr std::size_t kPlaceBytes = (14 * kGetBytes) + (3 * kIntBytes) + 24;
constexpr std::size_t kEndsBytes = 256;

[[noreturn]] void refuse(const std::string& why) {
    throw std::invalid_argument(why);
}

std::string entry(std::string_view column, std::size_t i, std::int64_t value) {
    return std::string(column) + "[" + std::to_string(i) + "]=" + std::to_string(value);
}

void same_length(std::string_view column, std::size_t length, std::size_t expected) {
    if (length == expected) return;
    refuse(std::string(column) + " has " + std::to_string(length) + " values where " +
           std::to_string(expected) + " are needed");
}

std::int64_t checked(std::string_view column, Ints values, std::size_t i, std::int64_t limit) {
    if (i >= values.size()) refuse(std::string(column) + " is too short");
    const std::int64_t value = values[i];
    if (value < 0) refuse(entry(column, i, value) + " is negative");
    if (value >= limit) {
        refuse(entry(column, i, value) + " is not below " + std::to_string(limit));
    }
    return value;
}

void check_lengths(const MetadataPrelude& prelude, const MetadataColumns& columns) {
    const std::size_t names = prelude.names.size();
    same_length("words", prelude.words.size(), kWords);
    same_length("properties", columns.properties.size(), names);
    same_length("ndims", columns.ndims.size(), names);
    same_length("counts", columns.counts.size(), names);
    same_length("sizes", columns.sizes.size(), columns.offsets.size());
    same_length("chunk_offsets", columns.chunk_offsets.size(), columns.chunk_files.size());
    same_length("chunk_lengths", columns.chunk_lengths.size(), columns.chunk_files.size());
    same_length("object_offsets", columns.object_offsets.size(), columns.object_files.size());
    same_length("object_lengths", columns.object_lengths.size(), columns.object_files.size());
}

/// Which torch.Size the memo has where. Forgets: layers repeat their shapes, and those of a layer's
/// tensors with their chunks' offsets are fewer than the places here.
class SeenSizes {
  public:
    struct Seen {
        const std::int64_t* values = nullptr;
        std::uint32_t ndim = 0;
        std::uint32_t memo = 0;
    };

    /// Where these values are or, if another `Seen` is there, belong.
    Seen& find(Ints values) {
        std::uint64_t hash = values.size();
        for (const std::int64_t value : values) {
            hash = std::rotl(hash ^ static_cast<std::uint64_t>(value), 23) * kOdd;
        }
        return seen_[hash >> (64U - kBits)];
    }

    static bool is(const Seen& seen, Ints values) {
        return seen.values != nullptr && std::ranges::equal(Ints(seen.values, seen.ndim), values);
    }

  private:
    static constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15U;
    static constexpr unsigned kBits = 16;
    std::vector<Seen> seen_ = std::vector<Seen>(std::size_t{1} << kBits);
};

class Writer {
  public:
    Writer(const MetadataPrelude& prelude, const MetadataColumns& columns, std::span<std::byte> out)
        : prelude_(prelude), columns_(columns), out_(out), memo_size_(prelude.memo_size) {
        constexpr std::int64_t kMaxMemo = std::numeric_limits<std::uint32_t>::max();
        if (memo_size_ < 0 || memo_size_ > kMaxMemo) refuse("memo_size is out of range");
        for (std::size_t i = 0; i < kWords; ++i) words_[i] = memo("words", prelude.words, i);
        offset_memos_.reserve(columns.chunk_files.size());
    }

    std::size_t run() {
        out_.item(prelude_.opcodes.size() + kEndsBytes);
        out_.bytes(prelude_.opcodes);
        state_dict_metadata();
        storage_data();
        out_.ops({Op::kSetItems, Op::kBuild});
        return out_.finish();
    }

  private:
    // --- references -----------------------------------------------------------------------------

    [[nodiscard]] std::uint32_t memo(std::string_view column, Ints indices, std::size_t i) const {
        return static_cast<std::uint32_t>(checked(column, indices, i, prelude_.memo_size));
    }

    void word(Word word) { out_.get(words_[static_cast<std::size_t>(word)]); }

    void instance(Word of) {
        word(of);
        out_.ops({Op::kEmptyTuple, Op::kNewObj});
    }

    void instance_with_attributes(Word of) {
        instance(of);
        out_.ops({Op::kEmptyDict, Op::kMark});
    }

    void end_attributes() { out_.ops({Op::kSetItems, Op::kBuild}); }

    /// A torch.Size of these values; returns where the memo has it.
    std::uint32_t torch_size(Ints values) {
        auto& seen = sizes_seen_.find(values);
        if (SeenSizes::is(seen, values)) {
            out_.get(seen.memo);
            return seen.memo;
        }
        word(Word::kTorchSize);
        if (values.size() > 3) out_.op(Op::kMark);
        for (const std::int64_t value : values) out_.integer(value);
        constexpr std::array kTuples{Op::kEmptyTuple, Op::kTuple1, Op::kTuple2, Op::kTuple3,
                                     Op::kTuple};
        out_.op(kTuples[std::min<std::size_t>(values.size(), kTuples.size() - 1)]);
        out_.ops({Op::kTuple1, Op::kReduce, Op::kMemoize});
        if (memo_size_ == std::numeric_limits<std::uint32_t>::max()) refuse("too many chunks");
        seen = {values.data(), static_cast<std::uint32_t>(values.size()),
                static_cast<std::uint32_t>(memo_size_++)};
        return seen.memo;
    }

    // --- state_dict_metadata --------------------------------------------------------------------

    void state_dict_metadata() {
        word(Word::kStateDictMetadata);
        out_.op(Op::kEmptyDict);
        PickleBatches items(out_, Op::kSetItems);
        std::size_t objects = 0;
        for (std::size_t name = 0; name < prelude_.names.size(); ++name) {
            out_.item(kEntryBytes);
            items.item();
            out_.get(memo("names", prelude_.names, name));
            if (columns_.properties[name] == -1) {
                object(name);
                ++objects;
            } else {
                tensor(name);
            }
        }
        items.finish();
        same_length("shapes", columns_.shapes.size(), shapes_used_);
        same_length("offsets", columns_.offsets.size(), values_used_);
        same_length("chunk_files", columns_.chunk_files.size(), offset_memos_.size());
        same_length("object_files", columns_.object_files.size(), objects);
    }

    void object(std::size_t name) {
        (void)checked("ndims", columns_.ndims, name, 1);
        (void)checked("counts", columns_.counts, name, 1);
        instance(Word::kBytesStorageMetadata);
    }

    void tensor(std::size_t name) {
        const auto properties = static_cast<std::size_t>(
            checked("properties", columns_.properties, name, std::ssize(prelude_.table)));
        const auto ndim =
            static_cast<std::size_t>(checked("ndims", columns_.ndims, name, kMaxDims + 1));
        const auto chunks_left = std::ssize(columns_.chunk_files) - std::ssize(offset_memos_);
        const std::int64_t count = checked("counts", columns_.counts, name, chunks_left + 1);
        const Ints shape = take("shapes", columns_.shapes, shapes_used_, ndim);
        for (std::size_t i = 0; i < ndim; ++i) not_negative("shapes", shape, i, shapes_used_);
        shapes_used_ += ndim;

        instance_with_attributes(Word::kTensorStorageMetadata);
        word(Word::kProperties);
        out_.get(memo("table", prelude_.table, properties));
        word(Word::kSize);
        out_.item(kSizeBytes + (kIntBytes * ndim) + kEntryBytes);
        (void)torch_size(shape);
        word(Word::kChunks);
        out_.op(Op::kEmptyList);
        PickleBatches items(out_, Op::kAppends);
        for (std::int64_t i = 0; i < count; ++i) {
            out_.item(kChunkBytes + (2 * (kSizeBytes + (kIntBytes * ndim))) + kEntryBytes);
            items.item();
            chunk(shape);
        }
        items.finish();
        end_attributes();
    }

    void chunk(Ints shape) {
        const Ints offsets = take("offsets", columns_.offsets, values_used_, shape.size());
        const Ints sizes = columns_.sizes.subspan(values_used_, shape.size());
        for (std::size_t i = 0; i < shape.size(); ++i) {
            not_negative("offsets", offsets, i, values_used_);
            not_negative("sizes", sizes, i, values_used_);
            if (offsets[i] > shape[i] || sizes[i] > shape[i] - offsets[i]) {
                refuse(entry("offsets", values_used_ + i, offsets[i]) + " with " +
                       entry("sizes", values_used_ + i, sizes[i]) +
                       " is outside of a tensor whose size there is " + std::to_string(shape[i]));
            }
        }
        values_used_ += shape.size();

        instance_with_attributes(Word::kChunkStorageMetadata);
        word(Word::kOffsets);
        offset_memos_.push_back(torch_size(offsets));
        word(Word::kSizes);
        (void)torch_size(sizes);
        end_attributes();
    }

    static Ints take(std::string_view column, Ints values, std::size_t begin, std::size_t count) {
        if (count > values.size() - begin) {
            refuse(std::string(column) + " ends after " + std::to_string(values.size()) +
                   " values, before its last entry");
        }
        return values.subspan(begin, count);
    }

    static void not_negative(std::string_view column, Ints values, std::size_t i,
                             std::size_t begin) {
        if (values[i] < 0) refuse(entry(column, begin + i, values[i]) + " is negative");
    }

    // --- storage_data ---------------------------------------------------------------------------

    void storage_data() {
        word(Word::kStorageData);
        out_.op(Op::kEmptyDict);
        PickleBatches items(out_, Op::kSetItems);
        std::size_t chunk = 0;
        for (std::size_t name = 0; name < prelude_.names.size(); ++name) {
            for (std::int64_t i = 0; i < columns_.counts[name]; ++i, ++chunk) {
                start_place(items, name);
                out_.integer(i);
                word(Word::kOffset);
                out_.get(offset_memos_.at(chunk));
                end_attributes();
                place(chunk, {"chunk_files", columns_.chunk_files},
                      {"chunk_offsets", columns_.chunk_offsets},
                      {"chunk_lengths", columns_.chunk_lengths});
            }
        }
        std::size_t object = 0;
        for (std::size_t name = 0; name < prelude_.names.size(); ++name) {
            if (columns_.properties[name] != -1) continue;
            start_place(items, name);
            out_.op(Op::kNone);
            end_attributes();
            place(object++, {"object_files", columns_.object_files},
                  {"object_offsets", columns_.object_offsets},
                  {"object_lengths", columns_.object_lengths});
        }
        items.finish();
    }

    /// A MetadataIndex up to the value of its `index`.
    void start_place(PickleBatches& items, std::size_t name) {
        out_.item(kPlaceBytes);
        items.item();
        instance_with_attributes(Word::kMetadataIndex);
        word(Word::kFqn);
        out_.get(memo("names", prelude_.names, name));
        word(Word::kIndex);
    }

    struct Column {
        std::string_view name;
        Ints values;
    };

    void place(std::size_t i, const Column& files, const Column& offsets, const Column& lengths) {
        constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
        const auto file = static_cast<std::size_t>(
            checked(files.name, files.values, i, std::ssize(prelude_.paths)));
        const std::int64_t offset = checked(offsets.name, offsets.values, i, kMax);
        const std::int64_t length = checked(lengths.name, lengths.values, i, kMax - offset);
        instance_with_attributes(Word::kStorageInfo);
        word(Word::kRelativePath);
        out_.get(memo("paths", prelude_.paths, file));
        word(Word::kOffset);
        out_.integer(offset);
        word(Word::kLength);
        out_.integer(length);
        word(Word::kTransformDescriptors);
        word(Word::kDescriptors);
        end_attributes();
    }

    MetadataPrelude prelude_;
    MetadataColumns columns_;
    PickleOutput out_;
    std::array<std::uint32_t, kWords> words_{};
    std::int64_t memo_size_;
    SeenSizes sizes_seen_;
    std::size_t shapes_used_ = 0;
    std::size_t values_used_ = 0;              // of offsets and of sizes
    std::vector<std::uint32_t> offset_memos_;  // of each chunk so far
};

}  // namespace

std::size_t metadata_pickle_bound(const MetadataPrelude& prelude, const MetadataColumns& columns) {
    check_lengths(prelude, columns);
    const std::size_t chunks = columns.chunk_files.size();
    const std::size_t places = chunks + columns.object_files.size();
    const std::size_t integers = columns.shapes.size() + (2 * columns.offsets.size());
    const std::size_t content = prelude.opcodes.size() + kEndsBytes +
                                (prelude.names.size() * (kEntryBytes + kSizeBytes)) +
                                (chunks * (kChunkBytes + (2 * kSizeBytes))) +
                                (places * kPlaceBytes) + (integers * kIntBytes);
    // What the largest item asks for beyond itself.
    const std::size_t slack = 4096;
    return content + slack + ((content / PickleOutput::kFrameBytes + 1) * PickleOutput::kFrameHead);
}

std::size_t write_metadata_pickle(const MetadataPrelude& prelude, const MetadataColumns& columns,
                                  std::span<std::byte> out) {
    if (out.size() < metadata_pickle_bound(prelude, columns)) {
        refuse("the output is smaller than the bound");
    }
    return Writer(prelude, columns, out).run();
}

}  // namespace datastates
