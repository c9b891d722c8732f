// Restores whose ranges the caller fetches.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "files/crc32c.h"
#include "pipeline/engine.h"
#include "support.h"

namespace datastates::testing {
namespace {

/// Files of a store, and memory to restore them into.
struct Store {
    explicit Store(const std::vector<std::uint64_t>& sizes) {
        for (const std::uint64_t size : sizes) {
            const auto& source =
                sources.emplace_back(std::make_unique<Source>(size, kMiB, files.size() + 1));
            Transfer transfer;
            Bytes& to = memory.emplace_back(size);
            for (const Range& region : source->regions) {
                transfer.add(region.begin, region.size(), to.data() + region.begin, 0);
            }
            const std::string path = "s3://" + std::to_string(files.size());
            const Bytes& file = (files[path] = reference_file(source->stream));
            plan.emplace_back(path, file.size(), size, transfer);
        }
    }

    [[nodiscard]] std::span<const std::byte> range(const Fetch& fetch) const {
        const Range bytes = fetch.step.bytes;
        return std::span(files.at(fetch.path)).subspan(bytes.begin, bytes.size());
    }
    [[nodiscard]] bool restored() const {
        for (std::size_t i = 0; i < memory.size(); ++i) {
            if (memory[i] != sources[i]->stream) return false;
        }
        return true;
    }

    std::vector<std::unique_ptr<Source>> sources;
    std::map<std::string, Bytes> files;
    std::vector<Bytes> memory;
    std::vector<RestoreFile> plan;
};

std::shared_ptr<ReadRequest> next(const RestoreHandle::Requests& requests) {
    auto taken = requests(in(60));
    check(taken.has_value(), "no request comes");
    return *std::move(taken);
}

void fetch_all(const RestoreHandle::Requests& requests, const Store& store) {
    while (const auto request = next(requests)) request->fill(store.range(request->fetch()));
}

void one_thread_fetches_all() {
    const auto ops = std::make_shared<HookedFileOps>();
    Engine engine(kSmallCache, {}, ops);
    Store store({0, 4, kMiB, kSegmentBytes - 4, kSegmentBytes, 2 * kSegmentBytes + 12, 40 * kMiB});
    const auto job = engine.restore_streamed(store.plan);
    fetch_all(job->requests(), store);
    check_restored(*job);
    check(store.restored());
    check(ops->trace().empty(), "no file was touched");
    check_restored(*engine.restore_streamed({}));
    check_all_free(engine.cache());
}

void requests_are_tables_and_then_whole_blocks() {
    Engine engine(kSmallCache);
    Bytes memory(4);
    Transfer transfer;
    transfer.add(9 * kMiB + 8, 4, memory.data(), 0);
    const Bytes file = reference_file(random_bytes(20 * kMiB, 1));
    const auto job = engine.restore_streamed({{"s3://a", file.size(), 20 * kMiB, transfer}});
    std::vector<std::pair<bool, std::uint64_t>> asked;
    const auto requests = job->requests();
    while (const auto request = next(requests)) {
        const auto& step = request->fetch().step;
        asked.emplace_back(step.table, step.bytes.begin);
        check_equal(step.bytes.size(), step.table ? 84U : kMiB);
        request->fill(std::span(file).subspan(step.bytes.begin, step.bytes.size()));
    }
    check_restored(*job);
    check(asked ==
          std::vector<std::pair<bool, std::uint64_t>>{{true, 20 * kMiB}, {false, 9 * kMiB}});
    check(std::ranges::equal(memory, std::span(file).subspan(9 * kMiB + 8, 4)));
}

/// Of 2 TiB: it takes two requests, and the same memory as that of a file that is read.
void a_table_may_be_larger_than_a_segment() {
    Engine engine(kSmallCache);
    constexpr std::uint64_t kTable = std::uint64_t{2} << 40U;
    std::vector<std::uint32_t> table(kTable / kMiB);
    const Bytes block = random_bytes(kMiB, 1);
    table[7] = crc32c(block);
    table.push_back(crc32c(std::as_bytes(std::span(table))));
    const auto words = std::as_bytes(std::span(table));
    Bytes memory(kMiB);
    Transfer transfer;
    transfer.add(7 * kMiB, kMiB, memory.data(), 0);
    const auto job = engine.restore_streamed({{"s3://a", kTable + words.size(), kTable, transfer}});
    const auto requests = job->requests();
    int tables = 0;
    while (const auto request = next(requests)) {
        const auto& [file, is_table, bytes] = request->fetch().step;
        tables += is_table ? 1 : 0;
        request->fill(is_table ? words.subspan(bytes.begin - kTable, bytes.size())
                               : std::span<const std::byte>(block));
    }
    check_restored(*job);
    check_equal(tables, 2);
    check(memory == block);
}

/// As many as there are segments for them; and no restore thread waits for them.
void many_requests_may_be_outstanding() {
    const TemporaryDirectory directory;
    Engine engine(24 * kSegmentBytes, {.copy = 1, .flush = 1, .restore = 1});
    Store store({200 * kMiB});
    const auto job = engine.restore_streamed(store.plan);
    const auto requests = job->requests();
    next(requests)->fill(store.range(
        {.step = {.bytes = {.begin = 200 * kMiB, .end = 200 * kMiB + 804}}, .path = "s3://0"}));
    std::vector<std::shared_ptr<ReadRequest>> outstanding;
    while (outstanding.size() < 16) outstanding.push_back(next(requests));

    const Source local(kMiB, kMiB, 1);
    write_file(directory.file("f"), reference_file(local.stream));
    Bytes memory(kMiB);
    Transfer transfer;
    transfer.add(0, kMiB, memory.data(), 0);
    const auto other = engine.restore(
        {{directory.file("f"), reference_file(local.stream).size(), kMiB, transfer}});
    check_restored(*other);

    std::ranges::reverse(outstanding);
    for (const auto& request : outstanding) request->fill(store.range(request->fetch()));
    outstanding.clear();
    fetch_all(requests, store);
    check_restored(*job);
    check(store.restored());
}

void a_flipped_bit_is_found(std::uint64_t at, const char* words) {
    Engine engine(kSmallCache);
    Store store({12 * kMiB});
    store.files["s3://0"][at] ^= std::byte{1};
    const auto job = engine.restore_streamed(store.plan);
    fetch_all(job->requests(), store);
    check((*job)->wait(in(60)));
    const auto fault = (*job)->fault();
    check(fault && fault->kind == FaultKind::kCorrupt && fault->path == "s3://0");
    check(describe(*fault).find(words) != std::string::npos, describe(*fault));
    check_equal(fault->offset, at / kMiB * kMiB);
    check_all_free(engine.cache());
}

void flipped_bits_are_found() {
    a_flipped_bit_is_found(0, "does not match its checksum");
    a_flipped_bit_is_found(12 * kMiB + 4, "its own checksum");
}

void a_request_that_is_dropped_cancels_the_restore() {
    Engine engine(kSmallCache);
    Store store({12 * kMiB});
    const auto job = engine.restore_streamed(store.plan);
    next(job->requests()).reset();
    check((*job)->wait(in(60)));
    check((*job)->fault()->kind == FaultKind::kCancelled);
    check_all_free(engine.cache());
}

void an_outstanding_request_is_not_waited_for_after_a_failure() {
    std::shared_ptr<ReadRequest> stuck;
    {
        Engine engine(kSmallCache);
        Store store({40 * kMiB});
        auto job = engine.restore_streamed(store.plan);
        const auto requests = job->requests();
        stuck = next(requests);
        check(!requests(in(0.05)), "the table comes first");
        job->fail(not_transferred("no answer", 110, "s3://0"));
        check(!next(requests), "there are no more");
        check((*job)->wait(in(60)));
        check_equal((*job)->fault()->error, 110);
        job.reset();
        stuck->fill(store.range(stuck->fetch()));  // nothing
        check_all_free(engine.cache());
        job = engine.restore_streamed(store.plan);
        stuck = next(job->requests());
    }
    check(stuck->fetch().step.table);
}

/// Failed by others, or the engine shut down, while threads fetch.
void anything_at_any_moment() {
    Store store({20 * kMiB, 4, kSegmentBytes});
    Random random(5);
    for (int round = 0; round < 60; ++round) {
        Engine engine(kSmallCache);
        auto job = engine.restore_streamed(store.plan);
        const auto delay = std::chrono::microseconds(random_below(random, 30'000));
        {
            std::vector<std::jthread> threads;
            for (int i = 0; i < 3; ++i) {
                threads.emplace_back(
                    [&, requests = job->requests()] { fetch_all(requests, store); });
            }
            std::this_thread::sleep_for(delay);
            if (round % 4 == 0) job->fail(not_transferred("at some time", 0, "s3://0"));
            if (round % 4 == 1) engine.shutdown();
            if (round % 4 == 2) job.reset();
        }
        if (round % 4 == 3) check_restored(*job);
        check_all_free(engine.cache());
    }
    check(store.restored());
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<one_thread_fetches_all, requests_are_tables_and_then_whole_blocks,
                     a_table_may_be_larger_than_a_segment, many_requests_may_be_outstanding,
                     flipped_bits_are_found, a_request_that_is_dropped_cancels_the_restore,
                     an_outstanding_request_is_not_waited_for_after_a_failure,
                     anything_at_any_moment>();
}
