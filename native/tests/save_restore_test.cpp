// Whole saves and restores through an engine, on real files.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "pipeline/engine.h"
#include "support.h"

namespace datastates::testing {
namespace {

std::uint64_t align4(std::uint64_t size) {
    return round_up(size, 4);
}

/// Restores random parts of a file, and compares them with its stream.
void check_restores(Engine& engine, const std::string& path, const Bytes& stream, Random& random) {
    Bytes out(stream.size(), std::byte{0});
    Transfer transfer;
    Bytes expected(stream.size(), std::byte{0});
    for (std::uint64_t at = 0; at < stream.size();) {
        const std::uint64_t length =
            std::min<std::uint64_t>(stream.size() - at, 1 + random_below(random, 3 * kMiB));
        if (random_below(random, 2) == 0) {
            transfer.add(at, length, out.data() + at, 0);
            std::memcpy(expected.data() + at, stream.data() + at, length);
        }
        at += length;
    }
    const std::vector<RestoreFile> files{
        RestoreFile(path, file_bytes(stream.size()), stream.size(), transfer)};
    const auto job = engine.restore(files);
    check_restored(*job);
    check(out == expected, "restored bytes");
}

void files_of_all_sizes_round_trip() {
    const TemporaryDirectory directory;
    Engine engine(kSmallCache);
    Random random(1);
    // Around every boundary: of blocks, of segments, and where the table spills into the next one.
    std::vector<std::uint64_t> sizes{0,
                                     4,
                                     4092,
                                     4096,
                                     kMiB - 4,
                                     kMiB,
                                     kMiB + 4,
                                     kSegmentBytes - 40,
                                     kSegmentBytes - 36,
                                     kSegmentBytes - 32,
                                     kSegmentBytes - 4,
                                     kSegmentBytes,
                                     kSegmentBytes + 4,
                                     3 * kSegmentBytes - 20,
                                     3 * kSegmentBytes};
    for (int i = 0; i < 5; ++i) sizes.push_back(align4(random_below(random, 30 * kMiB)));
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        const Source source(sizes[i], 1 + random_below(random, 4 * kMiB), i);
        const std::string path = directory.file(std::to_string(i));
        const auto job = engine.save({SaveFile(path, sizes[i], source.transfer)},
                                     {directory.path()}, i, open_window());
        check_durable(*job);
        check_equal((*job)->bytes_written(), file_bytes(sizes[i]));
        check_equal((*job)->bytes_read(), source.transfer.nbytes());
        check(read_file(path) == reference_file(source.stream),
              "file of " + std::to_string(sizes[i]));
        check_restores(engine, path, source.stream, random);
    }
    check_all_free(engine.cache());
}

void many_jobs_of_many_files_share_a_tiny_cache() {
    const TemporaryDirectory directory;
    Engine engine(kSmallCache);
    constexpr std::size_t kJobs = 6;
    constexpr std::size_t kFiles = 5;
    std::vector<std::unique_ptr<Source>> sources;
    std::vector<std::shared_ptr<SaveHandle>> jobs;
    Random random(2);
    for (std::size_t j = 0; j < kJobs; ++j) {
        std::vector<SaveFile> files;
        for (std::size_t f = 0; f < kFiles; ++f) {
            const std::uint64_t size = align4(random_below(random, 20 * kMiB));
            sources.push_back(std::make_unique<Source>(size, kMiB, sources.size()));
            files.emplace_back(directory.file(std::to_string(sources.size() - 1)), size,
                               sources.back()->transfer);
        }
        jobs.push_back(engine.save(files, {directory.path()}, j, open_window()));
    }
    for (const auto& job : jobs) {
        check_durable(*job);
    }
    std::vector<std::shared_ptr<RestoreHandle>> restores;
    std::vector<Bytes> outs;
    for (std::size_t i = 0; i < sources.size(); ++i) {
        const std::string path = directory.file(std::to_string(i));
        check(read_file(path) == reference_file(sources[i]->stream));
        outs.emplace_back(sources[i]->stream.size());
        restores.push_back(engine.restore({whole_file(path, outs.back())}));
    }
    for (std::size_t i = 0; i < sources.size(); ++i) {
        check((*restores[i])->wait(in(120)));
        check(outs[i] == sources[i]->stream);
    }
    check_all_free(engine.cache());
}

void only_needed_blocks_are_read() {
    const TemporaryDirectory directory;
    Engine engine(kSmallCache);
    const Source source(40 * kMiB, 4 * kMiB, 3);
    const std::string path = directory.file("f");
    const auto save =
        engine.save({SaveFile(path, 40 * kMiB, source.transfer)}, {}, 0, open_window());
    check((*save)->wait(in(60)));
    Bytes out(64);
    Transfer transfer;
    transfer.add(5 * kMiB - 8, 16, out.data(), 0);          // in two blocks
    transfer.add(30 * kMiB + 100, 16, out.data() + 16, 0);  // in one
    const auto job =
        engine.restore({RestoreFile(path, file_bytes(40 * kMiB), 40 * kMiB, transfer)});
    check_restored(*job);
    check_equal((*job)->bytes_read(), 3 * kMiB + 4 * 41);
    check(std::memcmp(out.data(), &source.stream[5 * kMiB - 8], 16) == 0);
    check(std::memcmp(out.data() + 16, &source.stream[30 * kMiB + 100], 16) == 0);
}

void every_flipped_bit_is_seen() {
    const TemporaryDirectory directory;
    Engine engine(kSmallCache);
    constexpr std::uint64_t kSize = 3 * kMiB + 1000;
    const Source source(kSize, 4 * kMiB, 4);
    const std::string path = directory.file("f");
    const auto save = engine.save({SaveFile(path, kSize, source.transfer)}, {}, 0, open_window());
    check((*save)->wait(in(60)));
    const Bytes good = read_file(path);
    Random random(5);
    for (int round = 0; round < 60; ++round) {
        // In the last rounds: in the table.
        const std::uint64_t at = round < 30 ? random_below(random, kSize)
                                            : kSize + random_below(random, good.size() - kSize);
        Bytes bad = good;
        bad[at] ^= std::byte{1} << static_cast<int>(random_below(random, 8));
        write_file(path, bad);
        Bytes out(kSize);
        const auto job = engine.restore({whole_file(path, out)});
        check((*job)->wait(in(60)));
        const auto fault = (*job)->fault();
        check(fault && fault->kind == FaultKind::kCorrupt && fault->path == path);
        check_equal(fault->offset, at < kSize ? at / kMiB * kMiB : kSize);
        const auto* const clean = out.data() + at / kMiB * kMiB;
        if (at < kSize) {
            check(std::all_of(clean, clean + std::min(kMiB, kSize - at / kMiB * kMiB),
                              [](std::byte b) { return b == std::byte{0}; }),
                  "a corrupt block was scattered");
        }
    }
    for (const std::uint64_t size : {good.size() - 1, good.size() + 1, std::size_t{0}}) {
        Bytes bad = good;
        bad.resize(size);
        write_file(path, bad);
        Bytes out(kSize);
        const auto job = engine.restore({whole_file(path, out)});
        check((*job)->wait(in(60)));
        check((*job)->fault() && (*job)->fault()->kind == FaultKind::kCorrupt);
    }
}

void groups_are_read_in_file_order() {
    const TemporaryDirectory directory;
    Engine engine(kSmallCache);
    const Bytes memory = random_bytes(64 * kMiB, 6);
    Transfer transfer;
    auto* const data = const_cast<std::byte*>(memory.data());  // NOLINT: only read
    transfer.add(0, kMiB, data, 0);
    transfer.add(kMiB, 63 * kMiB, data + kMiB, 1);
    const auto window = std::make_shared<Window>(in(600));
    const auto job =
        engine.save({SaveFile(directory.file("f"), 64 * kMiB, transfer)}, {}, 0, window);
    check(!(*job)->wait_read(0, in(0.05)));
    check((*job)->wait_read(2, Clock::now()), "a group without regions");
    window->open();
    check((*job)->wait_read(0, in(60)));
    check((*job)->wait_read(1, in(60)));
    check((*job)->wait_read(kEveryGroup, in(60)));
    check((*job)->wait(in(60)));
    check((*job)->read_seconds() > 0 && (*job)->total_seconds() >= (*job)->read_seconds());
}

/// The checksums of a file's blocks, from the table at its end.
std::vector<std::uint32_t> checksums_in(const Bytes& file, std::uint64_t table_offset) {
    std::vector<std::uint32_t> words((file.size() - table_offset) / sizeof(std::uint32_t));
    std::memcpy(words.data(), file.data() + table_offset, file.size() - table_offset);
    words.pop_back();  // the table's own
    return words;
}

void a_file_without_a_path_is_summed_and_not_written() {
    const TemporaryDirectory directory;
    Engine engine(kSmallCache);
    const Source written(kSegmentBytes + 8, kMiB, 1);
    for (const std::uint64_t size :
         {std::uint64_t{0}, kMiB - 4, kMiB + 4, kSegmentBytes, 3 * kSegmentBytes + 4, 40 * kMiB}) {
        const Source source(size, kMiB, size);
        const SaveFile summed("", size, source.transfer);
        const auto expected = checksums_in(reference_file(source.stream), size);
        const std::string path = directory.file(std::to_string(size));
        const SaveFile file(path, written.stream.size(), written.transfer);
        const auto both = engine.save({file, summed}, {directory.path()}, 0, open_window());
        check_durable(*both);
        check(read_file(path) == reference_file(written.stream), "what is written");
        check((*both)->checksums(1) == expected, "of " + std::to_string(size));
        check((*both)->direct());
        const auto alone = engine.save({summed}, {directory.path()}, 1, open_window());
        check_durable(*alone);
        check((*alone)->checksums(0) == expected);
        check_equal((*alone)->bytes_written(), std::uint64_t{0});

        const auto streamed = engine.save_streamed({file, summed}, 2, open_window());
        while (auto piece = streamed->job()->take(0, in(60))) {
            if (!piece->ok() || **piece == nullptr) break;
        }
        check_throws<std::invalid_argument>("no checksums", [&] { (*streamed)->checksums(1); });
        (*streamed)->stored(0);
        check_durable(*streamed);
        check((*streamed)->checksums(1) == expected);
    }
    check_all_free(engine.cache());
}

void bad_files_are_refused() {
    using Invalid = std::invalid_argument;
    Bytes memory(100);
    Transfer transfer;
    transfer.add(0, 100, memory.data(), 0);
    check_throws<Invalid>("multiple of 4", [&] { SaveFile("f", 102, transfer); });
    check_throws<Invalid>("beyond table_offset=96", [&] { SaveFile("f", 96, transfer); });
    check_throws<Invalid>("nbytes=100", [&] { RestoreFile("f", 100, 100, transfer); });
    Transfer constant;
    constant.add(0, 4, memory.data(), 0, Access::kReadOnly);
    check_throws<Invalid>("read-only", [&] { RestoreFile("f", file_bytes(4), 4, constant); });
    check_throws<Invalid>("below the minimum", [] { Engine(kSmallCache - 1); });
    check_throws<Invalid>("thread count", [] { Engine(kSmallCache, {.copy = 0}); });
    Engine engine(kSmallCache);
    check_throws<Invalid>("twice", [&] {
        static_cast<void>(engine.save({SaveFile("f", 100, transfer), SaveFile("f", 100, transfer)},
                                      {}, 0, open_window()));
    });
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<files_of_all_sizes_round_trip, many_jobs_of_many_files_share_a_tiny_cache,
                     only_needed_blocks_are_read, every_flipped_bit_is_seen,
                     groups_are_read_in_file_order, a_file_without_a_path_is_summed_and_not_written,
                     bad_files_are_refused>();
}
