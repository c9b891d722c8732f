// Named places where a test, or an operator rehearsing an outage, can make this process fail: the
// native half of dcp_datastates/storage/failpoints.py, with the same syntax.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace datastates {

/// Entries of `name=action` or `name@N=action` (the N-th hit only), separated by `;`. Actions:
/// kill, stop, sleep:SECONDS, error:ERRNO. Any thread.
class Failpoints {
  public:
    /// Of each name in `operations` there are two failpoints, `.before` and `.after`. Entries with
    /// other names are left to others. An action is preceded by a line with the name in the file
    /// `log_path` (empty: none). Throws std::invalid_argument for an entry that is none.
    Failpoints(std::string_view entries, std::span<const std::string_view> operations,
               std::string log_path);

    /// True if nothing will ever happen.
    [[nodiscard]] bool empty() const { return points_.empty(); }

    /// Does what is asked for here. Returns the error number to fail with, or 0.
    int hit(std::string_view name);

  private:
    enum class Verb : std::uint8_t { kKill, kStop, kSleep, kError };

    struct Action {
        std::optional<std::uint64_t> nth;  ///< only at this hit, counted from 1
        Verb verb = Verb::kKill;
        std::chrono::duration<double> time{};
        int error = 0;
    };

    struct Point {
        std::vector<Action> actions;
        std::atomic<std::uint64_t> hits = 0;
    };

    void add(std::string_view entry, std::span<const std::string_view> operations);
    static Action parse_action(std::string_view text);
    void log(std::string_view name) const;
    static int act(const Action& action);

    std::map<std::string, Point, std::less<>> points_;  // not changed once made, but for `hits`
    std::string log_path_;
};

}  // namespace datastates
