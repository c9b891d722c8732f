#include "files/failpoints.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>

namespace datastates {
namespace {

/// What storage is known to answer. (The C library's own table of names is too new for some.)
constexpr std::array<std::pair<std::string_view, int>, 28> kErrors{{
    {"EACCES", EACCES},       {"EAGAIN", EAGAIN}, {"EBADF", EBADF},
    {"EBUSY", EBUSY},         {"EDQUOT", EDQUOT}, {"EEXIST", EEXIST},
    {"EFAULT", EFAULT},       {"EFBIG", EFBIG},   {"EINTR", EINTR},
    {"EINVAL", EINVAL},       {"EIO", EIO},       {"EISDIR", EISDIR},
    {"ELOOP", ELOOP},         {"EMFILE", EMFILE}, {"ENAMETOOLONG", ENAMETOOLONG},
    {"ENFILE", ENFILE},       {"ENODEV", ENODEV}, {"ENOENT", ENOENT},
    {"ENOMEM", ENOMEM},       {"ENOSPC", ENOSPC}, {"ENOSYS", ENOSYS},
    {"ENOTDIR", ENOTDIR},     {"ENXIO", ENXIO},   {"EOPNOTSUPP", EOPNOTSUPP},
    {"EPERM", EPERM},         {"EROFS", EROFS},   {"ESTALE", ESTALE},
    {"ETIMEDOUT", ETIMEDOUT},
}};

constexpr std::string_view kBefore = ".before";
constexpr std::string_view kAfter = ".after";
constexpr std::string_view kDigits = "0123456789";

[[noreturn]] void refuse(std::string_view entry, const std::string& why) {
    throw std::invalid_argument("failpoint '" + std::string(entry) + "': " + why);
}

std::string_view stripped(std::string_view text) {
    constexpr std::string_view kBlank = " \t\n\r\f\v";
    const std::size_t begin = text.find_first_not_of(kBlank);
    if (begin == std::string_view::npos) return {};
    return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

/// All of `text` as a number that has no other characters than `allowed`.
template <typename Number>
Number to_number(std::string_view text, std::string_view allowed) {
    Number number{};
    const char* const end = std::to_address(text.end());
    const auto parsed = std::from_chars(std::to_address(text.begin()), end, number);
    if (text.find_first_not_of(allowed) != std::string_view::npos || parsed.ec != std::errc() ||
        parsed.ptr != end) {
        throw std::invalid_argument("'" + std::string(text) + "' is no number");
    }
    return number;
}

bool is_known(std::string_view name, std::span<const std::string_view> operations) {
    return std::ranges::any_of(operations, [&](std::string_view operation) {
        if (!name.starts_with(operation)) return false;
        const auto when = name.substr(operation.size());
        return when == kBefore || when == kAfter;
    });
}

}  // namespace

Failpoints::Failpoints(std::string_view entries, std::span<const std::string_view> operations,
                       std::string log_path)
    : log_path_(std::move(log_path)) {
    while (!entries.empty()) {
        const std::size_t end = std::min(entries.find(';'), entries.size());
        if (end > 0) add(entries.substr(0, end), operations);
        entries.remove_prefix(std::min(end + 1, entries.size()));
    }
}

void Failpoints::add(std::string_view entry, std::span<const std::string_view> operations) {
    const std::string_view text = stripped(entry);
    const std::size_t equals = std::min(text.find('='), text.size());
    const std::size_t at = std::min(text.find('@'), equals);
    const std::string_view name = text.substr(0, at);
    if (equals == text.size() || name.empty() ||
        name.find_first_not_of("abcdefghijklmnopqrstuvwxyz_.") != std::string_view::npos) {
        refuse(entry, "is not name=action or name@N=action");
    }
    try {
        Action action = parse_action(text.substr(equals + 1));
        if (at < equals) {
            action.nth = to_number<std::uint64_t>(text.substr(at + 1, equals - at - 1), kDigits);
        }
        if (!is_known(name, operations)) return;
        if (action.verb == Verb::kError && action.error == 0) {
            throw std::invalid_argument("the error is not one that the engine has a number for");
        }
        points_[std::string(name)].actions.push_back(action);
    } catch (const std::invalid_argument& error) {
        refuse(entry, error.what());
    }
}

Failpoints::Action Failpoints::parse_action(std::string_view text) {
    constexpr std::string_view kSleep = "sleep:";
    constexpr std::string_view kError = "error:";
    if (text == "kill") return {.nth = {}, .verb = Verb::kKill};
    if (text == "stop") return {.nth = {}, .verb = Verb::kStop};
    if (text.starts_with(kSleep)) {
        constexpr double kLongest = 1e8;  // years; what a clock can add without overflow
        const auto seconds = to_number<double>(text.substr(kSleep.size()), "0123456789.");
        return {.nth = {},
                .verb = Verb::kSleep,
                .time = std::chrono::duration<double>(std::min(seconds, kLongest))};
    }
    if (text.starts_with(kError)) {
        const std::string_view name = text.substr(kError.size());
        if (name.size() > 1 && name.front() == 'E' &&
            name.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") ==
                std::string_view::npos) {
            const auto* const found =
                std::ranges::find(kErrors, name, &std::pair<std::string_view, int>::first);
            return {.nth = {},
                    .verb = Verb::kError,
                    .time = {},
                    .error = found == kErrors.end() ? 0 : found->second};
        }
    }
    throw std::invalid_argument("the action is not kill, stop, sleep:SECONDS or error:ERRNO");
}

int Failpoints::hit(std::string_view name) {
    const auto found = points_.find(name);
    if (found == points_.end()) return 0;
    Point& point = found->second;
    const std::uint64_t count = ++point.hits;
    for (const Action& action : point.actions) {
        if (action.nth && *action.nth != count) continue;
        log(name);
        if (const int error = act(action)) return error;
    }
    return 0;
}

void Failpoints::log(std::string_view name) const {
    if (log_path_.empty()) return;
    const int fd = ::open(log_path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0) return;  // then the line is missing
    const std::string line = std::string(name) + "\n";
    static_cast<void>(::write(fd, line.data(), line.size()) < 0);
    ::close(fd);
}

int Failpoints::act(const Action& action) {
    switch (action.verb) {
        // To this thread, so that it goes no further; they end and stop the whole process.
        case Verb::kKill:
            std::raise(SIGKILL);
            break;
        case Verb::kStop:
            std::raise(SIGSTOP);
            break;
        case Verb::kSleep:
            std::this_thread::sleep_for(action.time);
            break;
        case Verb::kError:
            return action.error;
    }
    return 0;
}

}  // namespace datastates
