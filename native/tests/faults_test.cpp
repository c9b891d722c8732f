// Every file operation fails in turn: the job says so, nothing leaks, and the next job works.

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "pipeline/engine.h"
#include "support.h"

namespace datastates::testing {
namespace {

using Call = HookedFileOps::Call;
using Event = HookedFileOps::Event;
using Instead = HookedFileOps::Instead;

constexpr std::uint64_t kSize = 20 * kMiB + 12;

constexpr auto failing = &HookedFileOps::failing;

/// An engine whose file operations can be broken while it runs.
struct Broken {
    Broken()
        : ops(std::make_shared<HookedFileOps>([this](const Event& event) {
              const std::scoped_lock lock(mutex);
              return hook ? hook(event) : Instead{};
          })),
          engine(kSmallCache, {}, ops) {}

    void set(HookedFileOps::Hook next) {
        const std::scoped_lock lock(mutex);
        hook = std::move(next);
    }

    std::optional<Fault> save(const std::string& name) {
        const auto job = engine.save({SaveFile(directory.file(name), kSize, source.transfer)},
                                     {directory.path()}, 0, open_window());
        check((*job)->wait(in(60)), "the job ends");
        direct = (*job)->direct();
        check_all_free(engine.cache());
        check_equal(ops->open_files(), 0U);
        return (*job)->fault();
    }

    std::optional<Fault> restore(const std::string& name) {
        Bytes out(kSize);
        Transfer transfer;
        transfer.add(0, kSize, out.data(), 0);
        std::optional<Fault> fault;
        {
            const auto job = engine.restore(
                {RestoreFile(directory.file(name), file_bytes(kSize), kSize, transfer)});
            check((*job)->wait(in(60)), "the job ends");
            fault = (*job)->fault();
        }
        // A failed job is waited for no longer than it writes to its memory.
        wait_until("files stay open", [&] { return ops->open_files() == 0; });
        check(fault || std::equal(source.stream.begin(), source.stream.end(), out.begin()),
              "restored bytes");
        return fault;
    }

    void check_file(const std::string& name) {
        check(read_file(directory.file(name)) == reference_file(source.stream), "file " + name);
    }

    TemporaryDirectory directory;
    Source source{kSize, kMiB, 1};
    std::mutex mutex;  // guards hook
    HookedFileOps::Hook hook;
    bool direct = false;
    std::shared_ptr<HookedFileOps> ops;
    Engine engine;
};

void each_failing_call_fails_its_save_only() {
    struct Expected {
        Call call;
        int error;
        const char* operation;
    };
    Broken broken;
    int round = 0;
    for (const auto& [call, error, operation] :
         std::vector<Expected>{{Call::kOpen, EACCES, "open"},
                               {Call::kSetDirect, EIO, "open"},
                               {Call::kAllocate, ENOSPC, "fallocate"},
                               {Call::kWrite, EIO, "write"},
                               {Call::kWrite, ENOSPC, "write"},
                               {Call::kTruncate, EIO, "ftruncate"},
                               {Call::kSyncData, EIO, "fdatasync"},
                               {Call::kSync, EIO, "fsync"},
                               {Call::kClose, EIO, "close"}}) {
        const std::string name = std::to_string(round++);
        broken.set(
            [&](const Event& event) { return event.call == call ? failing(error) : Instead{}; });
        const auto fault = broken.save(name);
        check(fault.has_value(), operation);
        check(fault->kind == FaultKind::kIo && fault->error == error, describe(*fault));
        check(fault->operation == operation, describe(*fault));
        const bool of_directory = call == Call::kSync;
        check(fault->path ==
              (of_directory ? broken.directory.path() : broken.directory.file(name)));
        broken.set(nullptr);
        check(!broken.save(name + "-after"));
        broken.check_file(name + "-after");
    }
}

void a_file_system_without_fsync_of_directories_is_no_error() {
    Broken broken;
    for (const int error : {EINVAL, ENOSYS, EOPNOTSUPP}) {
        broken.set([&](const Event& event) {
            return event.call == Call::kSync ? failing(error) : Instead{};
        });
        const std::string name = std::to_string(error);
        check(!broken.save(name));
        broken.check_file(name);
    }
}

void a_failed_job_is_done_only_when_its_files_are_closed() {
    Broken broken;
    std::atomic<bool> closing = false;
    std::atomic<bool> go_on = false;
    broken.set([&](const Event& event) {
        if (event.call == Call::kWrite) return failing(EIO);
        if (event.call != Call::kClose) return Instead{};
        closing = true;
        closing.notify_all();
        go_on.wait(false);
        return Instead{};
    });
    const auto job =
        broken.engine.save({SaveFile(broken.directory.file("f"), kSize, broken.source.transfer)},
                           {}, 0, open_window());
    closing.wait(false);
    job->cancel();  // too late, and must not hasten the end
    const bool done = (*job)->wait(in(0.1));
    go_on = true;
    go_on.notify_all();
    check(!done, "its file is still open");
    check((*job)->wait(in(60)));
    check_equal(broken.ops->open_files(), 0U);
    check((*job)->fault()->error == EIO);
}

void a_failed_fdatasync_is_not_repeated() {
    Broken broken;
    std::atomic<int> calls = 0;
    broken.set([&](const Event& event) {
        if (event.call != Call::kSyncData) return Instead{};
        ++calls;
        return failing(EIO);
    });
    check(broken.save("f").has_value());
    check_equal(calls.load(), 1);
}

void refused_o_direct_falls_back() {
    Broken broken;
    broken.set([](const Event& event) {
        return event.call == Call::kSetDirect && event.size == 1 ? failing(EINVAL) : Instead{};
    });
    check(!broken.save("at-open"));
    check(!broken.direct);
    broken.check_file("at-open");
    check(!broken.restore("at-open"));
    // Only once reading or writing begins, by several threads at once.
    std::atomic<bool> direct = false;
    broken.set([&](const Event& event) {
        if (event.call == Call::kSetDirect) direct = event.size == 1;
        const bool moves = event.call == Call::kWrite || event.call == Call::kRead;
        return moves && direct ? failing(EINVAL) : Instead{};
    });
    check(!broken.save("at-write"));
    check(!broken.direct);
    broken.check_file("at-write");
    check(!broken.restore("at-write"));
    // An error that is met only in write-back must not be lost.
    broken.set([](const Event& event) {
        if (event.call == Call::kSetDirect) return failing(EINVAL);
        return event.call == Call::kStartWriteback ? failing(EIO) : Instead{};
    });
    check(broken.save("writeback").has_value());
}

void unsupported_fallocate_is_no_failure() {
    // EPERM is what a container's seccomp profile may answer.
    for (const int error : {EOPNOTSUPP, ENOSYS, EINVAL, EPERM}) {
        Broken broken;
        broken.set([&](const Event& event) {
            return event.call == Call::kAllocate ? failing(error) : Instead{};
        });
        check(!broken.save("f"));
        broken.check_file("f");
    }
}

void short_and_interrupted_calls_go_on() {
    Broken broken;
    for (const std::uint64_t cut : {kMiB, std::uint64_t{4096 * 3 + 5}, std::uint64_t{100'001}}) {
        std::atomic<unsigned> calls = 0;
        broken.set([&](const Event& event) {
            if (event.call == Call::kOpen) return calls++ % 2 == 0 ? failing(EINTR) : Instead{};
            if (event.call != Call::kWrite && event.call != Call::kRead) return Instead{};
            if (calls++ % 3 == 0) return failing(EINTR);
            return Instead{.result = {}, .cut = cut};
        });
        const std::string name = std::to_string(cut);
        const auto fault = broken.save(name);
        check(!fault, fault ? describe(*fault) : "");
        broken.check_file(name);
        check(!broken.restore(name));
    }
}

void each_failing_call_fails_its_restore() {
    Broken broken;
    check(!broken.save("f"));
    for (const auto call : {Call::kOpen, Call::kSize, Call::kRead}) {
        broken.set(
            [call](const Event& event) { return event.call == call ? failing(EIO) : Instead{}; });
        const auto fault = broken.restore("f");
        check(fault && fault->kind == FaultKind::kIo && fault->error == EIO);
        broken.set(nullptr);
        check(!broken.restore("f"));
    }
    broken.set([](const Event& event) {
        const bool end = event.call == Call::kRead;
        return end ? Instead{.result = SysResult{.value = 0, .error = 0}, .cut = {}} : Instead{};
    });
    const auto fault = broken.restore("f");
    check(fault && fault->kind == FaultKind::kIo && fault->error == 0);
    broken.set(nullptr);
    const auto missing = broken.restore("no such file");
    check(missing && missing->kind == FaultKind::kIo && missing->error == ENOENT);
}

/// Whether this file system can say what of a file is in the page cache.
bool can_read_cached(const std::string& path) {
    const auto system = posix_file_ops();
    const int fd = static_cast<int>(system->open(path, O_RDONLY | O_CLOEXEC, 0).value);
    Bytes page(4096);
    const bool can = system->read_cached(fd, page, 0).value == 4096;
    system->close(fd);
    return can;
}

void what_the_page_cache_has_is_read_from_there() {
    Broken broken;
    write_file(broken.directory.file("f"), reference_file(broken.source.stream));
    const bool supported = can_read_cached(broken.directory.file("f"));
    std::atomic<std::uint64_t> cached = 0;
    // All of it, which the system may drop meanwhile: a few times; then some of it, up to any
    // place, and the rest past the cache.
    constexpr std::uint64_t kAll = std::uint64_t{1} << 40U;
    int whole = 0;
    for (const std::uint64_t limit : {kAll, kAll, kAll, kAll, std::uint64_t{0}, 3 * kMiB + 4096,
                                      5 * kMiB + 1, std::uint64_t{100'001}}) {
        if (limit == kAll) static_cast<void>(read_file(broken.directory.file("f")));
        const auto before = broken.ops->trace().size();
        const int refusals = broken.ops->refusals();
        cached = 0;
        broken.set([&](const Event& event) {
            if (event.call != Call::kReadCached) return Instead{};
            const std::uint64_t done = cached.fetch_add(event.size);
            if (done >= limit) return failing(EAGAIN);
            return Instead{.result = {}, .cut = std::min(event.size, limit - done)};
        });
        check(!broken.restore("f"));
        const auto events = broken.ops->trace();
        bool past = false;
        for (std::size_t at = before; at < events.size(); ++at) {
            const auto& event = events[at];
            past = past || event.call == Call::kRead;
            check(event.call != Call::kSetDirect || event.size == 1, "O_DIRECT is kept");
        }
        const bool has_all = broken.ops->refusals() == refusals;
        check_equal(past, !has_all || limit < kAll);
        if (limit == kAll && has_all) ++whole;
    }
    check(whole > 0 || !supported);
    // An error of the cache is no error of the file.
    for (const int error : {EOPNOTSUPP, EINVAL, EIO, EINTR}) {
        std::atomic<int> calls = 0;
        broken.set([&](const Event& event) {
            return event.call == Call::kReadCached && calls++ == 0 ? failing(error) : Instead{};
        });
        check(!broken.restore("f"));
    }
    broken.set([](const Event& event) {
        const bool end = event.call == Call::kReadCached;
        return end ? Instead{.result = SysResult{.value = 0, .error = 0}, .cut = {}} : Instead{};
    });
    check(!broken.restore("f"), "what the cache calls the end is read past it");
    // A file that is not what was saved is refused, wherever it is read from.
    Bytes damaged = reference_file(broken.source.stream);
    damaged[kMiB] ^= std::byte{1};
    write_file(broken.directory.file("damaged"), damaged);
    broken.set([](const Event& event) {
        return event.call == Call::kReadCached ? Instead{.result = {}, .cut = event.size}
                                               : Instead{};
    });
    const auto fault = broken.restore("damaged");
    check(fault && fault->kind == FaultKind::kCorrupt);
}

void an_existing_file_is_left_alone() {
    Broken broken;
    const Bytes old = random_bytes(100, 9);
    write_file(broken.directory.file("f"), old);
    const auto fault = broken.save("f");
    check(fault && fault->error == EEXIST && fault->operation == "open");
    check(read_file(broken.directory.file("f")) == old);
}

void bytes_are_durable_before_entries() {
    Broken broken;
    check(!broken.save("f"));
    bool synced = false;
    bool closed = false;
    for (const Event& event : broken.ops->trace()) {
        if (event.call == Call::kSyncData) synced = true;
        if (event.call == Call::kClose && event.path == broken.directory.file("f")) closed = true;
        if (event.call == Call::kWrite || event.call == Call::kTruncate) check(!synced);
        if (event.call == Call::kSync) check(synced && closed);
        if (event.call == Call::kWrite) check(event.size % 4096 == 0 && event.offset % 4096 == 0);
    }
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<each_failing_call_fails_its_save_only,
                     a_file_system_without_fsync_of_directories_is_no_error,
                     a_failed_job_is_done_only_when_its_files_are_closed,
                     a_failed_fdatasync_is_not_repeated, refused_o_direct_falls_back,
                     unsupported_fallocate_is_no_failure, short_and_interrupted_calls_go_on,
                     each_failing_call_fails_its_restore,
                     what_the_page_cache_has_is_read_from_there, an_existing_file_is_left_alone,
                     bytes_are_durable_before_entries>();
}
