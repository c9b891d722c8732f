// Named places where a test, or an operator rehearsing an outage, can make this process fail.
// dcp_datastates/storage/failpoints.py reads from the environment which, and how.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace datastates {

/// What to do at one of those places.
struct Failpoint {
    enum class Action : std::uint8_t { kKill, kStop, kSleep, kError };

    std::string name;
    std::optional<std::uint64_t> nth;  ///< only at this hit, counted from 1
    Action action = Action::kKill;
    std::chrono::duration<double> time{};  ///< to sleep
    int error = 0;                         ///< to fail with
};

/// Counts hits by name and does what is asked for, in order. Any thread; a forked child goes on
/// counting.
class Failpoints {
  public:
    using Sleep = std::function<void(std::chrono::duration<double>)>;

    /// An action is preceded by a line with the name in the file `log_path` (empty: none).
    Failpoints(const std::vector<Failpoint>& points, std::string log_path);

    /// True if nothing will ever happen.
    [[nodiscard]] bool empty() const { return points_.empty(); }

    /// Does what is asked for here; sleeps by `sleep`. Returns the error number to fail with, or 0.
    int hit(std::string_view name, const Sleep& sleep);
    int hit(std::string_view name);

  private:
    struct Point {
        std::vector<Failpoint> actions;
        std::atomic<std::uint64_t> hits = 0;
    };

    void log(std::string_view name) const;

    std::map<std::string, Point, std::less<>> points_;  // not changed once made, but for `hits`
    std::string log_path_;
};

}  // namespace datastates
