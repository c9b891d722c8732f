// That unpicklers make of it what was meant, tests/unit/format/test_metadata_pickle.py sees; here:
// bounds, and what is refused, under sanitizers.

#include "metadata/metadata_pickle.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "metadata/pickle_opcodes.h"
#include "metadata/pickle_output.h"

namespace datastates::testing {
namespace {

using Values = std::vector<std::int64_t>;

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

/// Columns that own their values, and a prelude that puts numbers where classes would be.
struct Checkpoint {
    Values properties, ndims, shapes, counts, offsets, sizes;
    Values chunk_files, chunk_offsets, chunk_lengths, object_files, object_offsets, object_lengths;
    Values names;
    std::vector<Values*> all{&properties,    &ndims,        &shapes,         &counts,
                             &offsets,       &sizes,        &chunk_files,    &chunk_offsets,
                             &chunk_lengths, &object_files, &object_offsets, &object_lengths};

    Checkpoint() = default;
    Checkpoint(const Checkpoint&) = delete;
    Checkpoint& operator=(const Checkpoint&) = delete;
    Checkpoint(Checkpoint&&) = delete;
    Checkpoint& operator=(Checkpoint&&) = delete;
    ~Checkpoint() = default;

    void tensor(const Values& shape, std::int64_t chunks) {
        names.push_back(kClasses + std::ssize(names) % 2);
        properties.push_back(0);
        ndims.push_back(std::ssize(shape));
        shapes.insert(shapes.end(), shape.begin(), shape.end());
        counts.push_back(chunks);
        for (std::int64_t i = 0; i < chunks; ++i) {
            offsets.insert(offsets.end(), shape.size(), 0);
            sizes.insert(sizes.end(), shape.begin(), shape.end());
            if (!shape.empty()) {
                offsets[offsets.size() - shape.size()] = shape[0] - i;
                sizes[sizes.size() - shape.size()] = i;
            }
            chunk_files.push_back(1);
            chunk_offsets.push_back(kMax / 2);
            chunk_lengths.push_back(kMax / 2);
        }
    }

    void object() {
        names.push_back(kClasses);
        properties.push_back(-1);
        ndims.push_back(0);
        counts.push_back(0);
        object_files.push_back(0);
        object_offsets.push_back(0);
        object_lengths.push_back(7);
    }

    [[nodiscard]] MetadataColumns columns() const {
        return {.properties = properties,
                .ndims = ndims,
                .shapes = shapes,
                .counts = counts,
                .offsets = offsets,
                .sizes = sizes,
                .chunk_files = chunk_files,
                .chunk_offsets = chunk_offsets,
                .chunk_lengths = chunk_lengths,
                .object_files = object_files,
                .object_offsets = object_offsets,
                .object_lengths = object_lengths};
    }

    static constexpr std::int64_t kClasses = static_cast<std::int64_t>(kWords);
};

/// Classes for all words, of which the strings are memoized at their places, and two names behind.
std::string opcodes() {
    std::string written = "cm\nMetadata\n)\x81}(X\x01" + std::string(3, '\0') + "p(";
    for (std::size_t i = 0; i < kWords + 2; ++i) {
        const bool text = i > static_cast<std::size_t>(Word::kTorchSize);
        written += text ? "X\x01" + std::string(3, '\0') + static_cast<char>('a' + i) : "cm\nC\n";
        written += '\x94';
    }
    return written + "t";
}

/// The pickle, written to memory of exactly the bound's size.
std::vector<std::byte> write(const Checkpoint& checkpoint) {
    const std::string before = opcodes();
    Values words(kWords);
    std::iota(words.begin(), words.end(), 0);
    const Values table{0};
    const Values paths{Checkpoint::kClasses, Checkpoint::kClasses + 1};
    const MetadataPrelude prelude{.opcodes = std::as_bytes(std::span(before)),
                                  .memo_size = std::ssize(words) + 2,
                                  .words = words,
                                  .names = checkpoint.names,
                                  .table = table,
                                  .paths = paths};
    const auto columns = checkpoint.columns();
    std::vector<std::byte> out(metadata_pickle_bound(prelude, columns));
    out.resize(write_metadata_pickle(prelude, columns, out));
    return out;
}

/// Frames follow one another from the PROTO to the STOP.
void framed(const std::vector<std::byte>& pickle) {
    std::size_t at = 2;
    while (at < pickle.size()) {
        check(pickle[at] == static_cast<std::byte>(Op::kFrame), "no frame where one must begin");
        std::uint64_t length = 0;
        check(pickle.size() - at >= PickleOutput::kFrameHead, "a frame is cut short");
        std::memcpy(&length, &pickle[at + 1], sizeof(length));
        at += PickleOutput::kFrameHead + length;
    }
    check(at == pickle.size(), "the last frame is longer than the pickle");
    check(pickle.back() == static_cast<std::byte>(Op::kStop), "no STOP at the end");
}

void accepted(const Checkpoint& checkpoint) {
    framed(write(checkpoint));
}

void nothing_is_a_checkpoint() {
    accepted(Checkpoint());
}

void largest_numbers_fit_the_bound() {
    Checkpoint checkpoint;
    for (int i = 0; i < 100; ++i) {
        checkpoint.tensor(Values(64, kMax), 30);
        checkpoint.tensor({}, 1);
        checkpoint.object();
    }
    accepted(checkpoint);
}

void batches_and_frames_end_where_they_must() {
    for (const std::int64_t chunks : {0, 1, 999, 1000, 1001, 2000, 5000}) {
        Checkpoint checkpoint;
        checkpoint.tensor({10'000, 3}, chunks);
        checkpoint.object();
        accepted(checkpoint);
    }
    for (const int names : {999, 1000, 1001, 10'000}) {
        Checkpoint checkpoint;
        for (int i = 0; i < names; ++i) checkpoint.object();
        accepted(checkpoint);
    }
}

void inconsistent_columns_are_refused() {
    const auto refused = [](std::string_view why, auto&& change) {
        Checkpoint checkpoint;
        checkpoint.tensor({4, 3}, 2);
        checkpoint.object();
        change(checkpoint);
        check_throws<std::invalid_argument>(why, [&] { write(checkpoint); });
    };
    refused("counts[0]=3 is not below 3", [](auto& c) { c.counts[0] = 3; });
    refused("counts[0]=-1 is negative", [](auto& c) { c.counts[0] = -1; });
    refused("offsets has 4 values where 2", [](auto& c) { c.counts[0] = 1; });
    refused("offsets[0]=5", [](auto& c) { c.offsets[0] = 5; });
    refused("outside of a tensor", [](auto& c) { c.sizes[2] = kMax; });
    refused("ndims[0]=65", [](auto& c) { c.ndims[0] = 65; });
    refused("shapes ends after 2", [](auto& c) { c.ndims[0] = 3; });
    refused("is not below", [](auto& c) { c.names[0] = Checkpoint::kClasses + 2; });
    refused("chunk_files[1]=2", [](auto& c) { c.chunk_files[1] = 2; });
    refused("chunk_lengths[1]", [](auto& c) { c.chunk_lengths[1] = kMax; });
    refused("object_files has 1", [](auto& c) { c.properties[1] = 0; });
    refused("object_lengths has 0", [](auto& c) { c.object_lengths.clear(); });
}

void random_columns_are_refused_or_written() {
    std::mt19937_64 random(1);
    int written = 0;
    int refused = 0;
    for (int round = 0; round < 20'000; ++round) {
        Checkpoint checkpoint;
        checkpoint.tensor({4, 3}, 2);
        checkpoint.object();
        checkpoint.tensor({}, 1);
        for (auto edits = 1 + random() % 3; edits > 0; --edits) {
            Values& column = *checkpoint.all[random() % checkpoint.all.size()];
            const auto value = static_cast<std::int64_t>(random() % 6) - 1;
            if (random() % 4 == 0) {
                column.resize(random() % 5, value);
            } else if (!column.empty()) {
                column[random() % column.size()] = random() % 8 == 0 ? kMax - value - 1 : value;
            }
        }
        try {
            accepted(checkpoint);
            ++written;
        } catch (const std::invalid_argument&) {
            ++refused;
        }
    }
    check(written > 100 && refused > 100, "hardly any were");
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;  // NOLINT(google-build-using-namespace)
    return run_cases({
        {"nothing_is_a_checkpoint", nothing_is_a_checkpoint},
        {"the_largest_numbers_fit_the_bound", largest_numbers_fit_the_bound},
        {"batches_and_frames_end_where_they_must", batches_and_frames_end_where_they_must},
        {"inconsistent_columns_are_refused", inconsistent_columns_are_refused},
        {"random_columns_are_refused_or_written", random_columns_are_refused_or_written},
    });
}
