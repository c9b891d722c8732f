// What the stress tests do to an engine: storage that fails at random, and callers without manners.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/immovable.h"
#include "pipeline/engine.h"
#include "support.h"

namespace datastates::testing {

/// Ends the process, saying who hung, unless it is destroyed before `limit` has passed.
class Watchdog : public Immovable {
  public:
    Watchdog(std::string what, std::chrono::seconds limit);

  private:
    std::mutex mutex_;                    // guards nothing: for the condition
    std::condition_variable_any barked_;  // never: the wait ends with the thread, or at the limit
    std::jthread thread_;
};

/// What happened, so that a run in which nothing did is seen to be none.
struct Tally {
    std::atomic<std::uint64_t> submitted = 0;
    std::atomic<std::uint64_t> durable = 0;
    std::atomic<std::uint64_t> failed = 0;
    std::atomic<std::uint64_t> cancelled = 0;
    std::atomic<std::uint64_t> shut_down = 0;
    std::atomic<std::uint64_t> dropped = 0;
    std::atomic<std::uint64_t> restored = 0;
    std::atomic<std::uint64_t> slabs = 0;
    std::atomic<std::uint64_t> injected = 0;

    void print() const;
};

/// The system's file operations, some of which are late, short or interrupted, and refuse O_DIRECT;
/// with `failing`, one in a hundred fails.
enum class Storage : std::uint8_t { kUnsteady, kFailing };
std::shared_ptr<HookedFileOps> storage_at_random(Storage storage, std::uint64_t seed, Tally& tally);

/// A stream, and the file that it must become.
struct Sample {
    Sample(std::uint64_t size, std::uint64_t seed)
        : source(size, kMiB, seed), file(reference_file(source.stream)) {}

    Source source;
    Bytes file;
};

/// One engine, and what its callers share.
class Scene {
  public:
    /// `samples_saved` and `tally_kept` outlive all jobs.
    Scene(Engine& engine_used, const std::vector<std::unique_ptr<Sample>>& samples_saved,
          std::string directory_used, Storage storage_used, Tally& tally_kept);

    Engine& engine;
    const std::vector<std::unique_ptr<Sample>>& samples;
    const std::string directory;
    const Storage storage;
    Tally& tally;
    std::atomic<std::uint64_t> order = 0;
    std::atomic<bool> over = false;      // callers begin nothing new
    std::atomic<bool> stopping = false;  // `shutdown` may have been called

    /// Opens a window, or cancels one of the saves last submitted. Sooner or later opens all
    /// windows: a caller may wait for what others have not opened.
    void meddle(Random& random);
    void add(const std::shared_ptr<Window>& window, const std::shared_ptr<SaveHandle>& job);

  private:
    std::mutex mutex_;  // guards what follows
    std::vector<std::weak_ptr<Window>> windows_;
    std::deque<std::weak_ptr<SaveHandle>> jobs_;  // that read `samples`: anybody may drop them last
};

/// Saves, waits, cancels, drops, restores and compares until the scene is over or the engine ends.
class Caller {
  public:
    Caller(Scene& scene, std::uint64_t seed)
        : scene_(scene), name_(std::to_string(seed)), random_(seed) {}

    /// When it returns, all its jobs have ended.
    void run();

  private:
    struct Target {
        std::string path;
        const Sample* sample;
    };
    struct Saved {
        std::shared_ptr<SaveHandle> job;
        std::shared_ptr<Window> window;
        std::vector<Target> files;
        Lease slab;
    };

    void one_save();
    void submit(Saved& saved, std::uint64_t order);
    void save_what_is_gone_soon();
    std::shared_ptr<Window> random_window();
    Lease random_slab(std::uint64_t order);
    void settle(Saved saved);
    void restore(const Target& file);
    bool one_in(std::uint64_t count) { return random_below(random_, count) == 0; }

    Scene& scene_;
    const std::string name_;
    Random random_;
    std::uint64_t files_ = 0;
    std::deque<Saved> in_flight_;
};

}  // namespace datastates::testing
