#include "files/failpoints.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <thread>
#include <utility>

namespace datastates {

Failpoints::Failpoints(const std::vector<Failpoint>& points, std::string log_path)
    : log_path_(std::move(log_path)) {
    for (const Failpoint& point : points) points_[point.name].actions.push_back(point);
}

int Failpoints::hit(std::string_view name, const Sleep& sleep) {
    const auto found = points_.find(name);
    if (found == points_.end()) return 0;
    Point& point = found->second;
    const std::uint64_t count = ++point.hits;
    for (const Failpoint& each : point.actions) {
        if (each.nth && *each.nth != count) continue;
        log(name);
        switch (each.action) {
            // To this thread, so that it goes no further; they end and stop the whole process.
            case Failpoint::Action::kKill:
                std::raise(SIGKILL);
                break;
            case Failpoint::Action::kStop:
                std::raise(SIGSTOP);
                break;
            case Failpoint::Action::kSleep:
                sleep(each.time);
                break;
            case Failpoint::Action::kError:
                return each.error;
        }
    }
    return 0;
}

int Failpoints::hit(std::string_view name) {
    constexpr std::chrono::duration<double> kLongest(1e8);  // what a clock can add
    return hit(name, [=](auto time) { std::this_thread::sleep_for(std::min(time, kLongest)); });
}

void Failpoints::log(std::string_view name) const {
    if (log_path_.empty()) return;
    const int fd = ::open(log_path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0) return;  // then the line is missing
    const std::string line = std::string(name) + "\n";
    static_cast<void>(::write(fd, line.data(), line.size()) < 0);
    ::close(fd);
}

}  // namespace datastates
