#include "files/trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <utility>

namespace datastates {
namespace {

// Of the process, not of an engine, which may follow another. Trivially destructible.
std::atomic<std::uint64_t> syncs{0};  // NOLINT(*-avoid-non-const-global-variables)

constexpr std::string_view kHexDigits = "0123456789abcdef";

std::string hex(std::span<const std::byte> data) {
    std::string text;
    text.reserve(2 * data.size());
    for (const std::byte value : data) {
        const auto number = std::to_integer<unsigned>(value);
        text += kHexDigits[number >> 4U];
        text += kHexDigits[number & 0xFU];
    }
    return text;
}

std::string begin_line(std::string_view operation, std::string_view path) {
    return R"({"op": ")" + std::string(operation) + R"(", "path": )" + json_string(path);
}

std::string sized_line(std::string_view operation, std::string_view path, std::uint64_t nbytes) {
    return begin_line(operation, path) + R"(, "size": )" + std::to_string(nbytes);
}

std::string sync_line(std::string_view operation, std::string_view path, std::string_view id) {
    return begin_line(operation, path) + R"(, "id": )" + json_string(id);
}

}  // namespace

std::string json_string(std::string_view text) {
    constexpr std::string_view kNamed = "\"\\\b\f\n\r\t";
    std::string json = "\"";
    for (const char character : text) {
        const auto value = static_cast<unsigned char>(character);
        if (const std::size_t named = kNamed.find(character); named != std::string_view::npos) {
            json += '\\';
            json += std::string_view("\"\\bfnrt")[named];
        } else if (value < 0x20) {
            json += std::string("\\u00") + kHexDigits[value >> 4U] + kHexDigits[value & 0xFU];
        } else {
            json += character;
        }
    }
    return json + '"';
}

Trace::Trace(std::string path) : path_(std::move(path)) {}

int Trace::created(std::string_view path) const {
    return append(begin_line("create", path));
}

int Trace::wrote(std::string_view path, std::uint64_t offset,
                 std::span<const std::byte> data) const {
    return append(begin_line("write", path) + R"(, "offset": )" + std::to_string(offset) +
                  R"(, "data": ")" + hex(data) + '"');
}

int Trace::allocated(std::string_view path, std::uint64_t nbytes) const {
    return append(sized_line("allocate", path, nbytes));
}

int Trace::truncated(std::string_view path, std::uint64_t nbytes) const {
    return append(sized_line("truncate", path, nbytes));
}

int Trace::sync_begins(std::string_view path, std::string_view id) const {
    return append(sync_line("sync_begin", path, id));
}

int Trace::synced(std::string_view path, std::string_view id) const {
    return append(sync_line("sync", path, id));
}

std::string Trace::new_sync_id() {
    return std::to_string(::getpid()) + ".n" + std::to_string(++syncs);
}

int Trace::append(std::string line) const {
    line += "}\n";
    const int fd = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0) return errno;
    const ssize_t written = ::write(fd, line.data(), line.size());
    const int error = written < 0 ? errno : 0;
    ::close(fd);
    if (error != 0) return error;
    return static_cast<std::size_t>(written) == line.size() ? 0 : EIO;
}

}  // namespace datastates
