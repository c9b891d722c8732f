#include "files/trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
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

struct CodePoint {
    char32_t value = 0;
    std::size_t nbytes = 1;
};

/// The first code point of `text`. A byte that is no UTF-8 is what Python makes of it in a path:
/// half of a surrogate pair.
CodePoint decode(std::string_view text) {
    const auto byte = [&](std::size_t i) {
        return static_cast<char32_t>(static_cast<unsigned char>(text[i]));
    };
    const char32_t lead = byte(0);
    if (lead < 0x80) return {.value = lead};
    const CodePoint escaped{.value = 0xDC00 + lead};
    if (lead < 0xC2 || lead > 0xF4) return escaped;
    std::size_t nbytes = 2;
    if (lead >= 0xE0) nbytes = lead < 0xF0 ? 3 : 4;
    if (nbytes > text.size()) return escaped;
    char32_t value = lead & (0x7FU >> nbytes);
    for (std::size_t i = 1; i < nbytes; ++i) {
        if ((byte(i) & 0xC0U) != 0x80) return escaped;
        value = (value << 6U) | (byte(i) & 0x3FU);
    }
    constexpr std::array<char32_t, 5> kSmallest{0, 0, 0x80, 0x800, 0x10000};
    const bool surrogate = value >= 0xD800 && value <= 0xDFFF;
    if (value < kSmallest.at(nbytes) || value > 0x10FFFF || surrogate) return escaped;
    return {.value = value, .nbytes = nbytes};
}

void append_escape(std::string& json, char32_t unit) {
    json += "\\u";
    for (const unsigned shift : {12U, 8U, 4U, 0U}) json += kHexDigits[(unit >> shift) & 0xFU];
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
    std::string json = "\"";
    while (!text.empty()) {
        const auto [value, nbytes] = decode(text);
        text.remove_prefix(nbytes);
        constexpr std::string_view kNamed = "\"\\\b\f\n\r\t";
        const std::size_t named =
            value < 0x80 ? kNamed.find(static_cast<char>(value)) : std::string_view::npos;
        if (named != std::string_view::npos) {
            json += '\\';
            json += std::string_view("\"\\bfnrt")[named];
        } else if (value >= 0x20 && value < 0x7F) {
            json += static_cast<char>(value);
        } else if (value < 0x10000) {
            append_escape(json, value);
        } else {
            append_escape(json, 0xD800 + ((value - 0x10000) >> 10U));
            append_escape(json, 0xDC00 + ((value - 0x10000) & 0x3FFU));
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
