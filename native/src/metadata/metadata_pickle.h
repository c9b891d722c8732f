// Writing the pickle of a checkpoint's metadata from columns, without an object per chunk.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace datastates {

/// What every chunk's pickle refers to: classes and the names of their attributes.
enum class Word : std::uint8_t {
    kTensorStorageMetadata,
    kBytesStorageMetadata,
    kChunkStorageMetadata,
    kMetadataIndex,
    kStorageInfo,
    kTorchSize,
    kProperties,
    kSize,
    kChunks,
    kOffsets,
    kSizes,
    kFqn,
    kIndex,
    kOffset,
    kRelativePath,
    kLength,
    kStateDictMetadata,
    kStorageData,
    kTransformDescriptors,
    kDescriptors,  // the value of that attribute, the same for all
};
inline constexpr std::size_t kWords = 20;

using Ints = std::span<const std::int64_t>;

/// The columns of Catalog and Placement (dcp_datastates/format/chunk_table.py says what they hold).
struct MetadataColumns {
    Ints properties, ndims, shapes, counts, offsets, sizes;
    Ints chunk_files, chunk_offsets, chunk_lengths;
    Ints object_files, object_offsets, object_lengths;
};

/// What comes before the columns, and where the unpickler's memo has what they refer to.
///
/// `opcodes` follow PROTO and have no frames. They leave on the stack a Metadata instance, a dict
/// and a mark, and above it pairs of attributes and their values. Each of the others is an index
/// of the memo, which has `memo_size` entries by then.
struct MetadataPrelude {
    std::span<const std::byte> opcodes;
    std::int64_t memo_size = 0;
    Ints words;  // kWords of them, in order of Word
    Ints names;
    Ints table;  // of properties
    Ints paths;
};

/// Bytes that the pickle has at most. `std::invalid_argument` if the columns' lengths do not agree.
std::size_t metadata_pickle_bound(const MetadataPrelude& prelude, const MetadataColumns& columns);

/// Writes to `out` the prelude, the attributes state_dict_metadata and storage_data, and all else
/// up to STOP; returns the bytes written. `out` has the bound's size.
///
/// `std::invalid_argument` if the columns are inconsistent: lengths, indices, negative numbers, a
/// chunk outside of its tensor. What `out` holds is then unspecified. Linear in the columns'
/// length.
std::size_t write_metadata_pickle(const MetadataPrelude& prelude, const MetadataColumns& columns,
                                  std::span<std::byte> out);

}  // namespace datastates
