// A record of what was done to files while saving, from which a test works out what a crash could
// have left behind: the native half of dcp_datastates/storage/operations.py, in the same format.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace datastates {

/// Appends a line of JSON per operation to a file that other processes append to as well: each line
/// is one write(2). The functions return 0, or the error number if the line could not be written: a
/// trace that lacks an operation would prove what is not so. Any thread.
class Trace {
  public:
    explicit Trace(std::string path);

    [[nodiscard]] int created(std::string_view path) const;
    [[nodiscard]] int wrote(std::string_view path, std::uint64_t offset,
                            std::span<const std::byte> data) const;
    /// fallocate(2) from offset 0: the file is at least `nbytes` long now.
    [[nodiscard]] int allocated(std::string_view path, std::uint64_t nbytes) const;
    [[nodiscard]] int truncated(std::string_view path, std::uint64_t nbytes) const;
    /// A sync covers what was recorded before its beginning. `id` ties the two together.
    [[nodiscard]] int sync_begins(std::string_view path, std::string_view id) const;
    [[nodiscard]] int synced(std::string_view path, std::string_view id) const;

    /// An id that no other sync has, in this process or another.
    static std::string new_sync_id();

  private:
    [[nodiscard]] int append(std::string line) const;

    std::string path_;
};

/// `text` as a string of JSON, quotes included. Bytes that are no ASCII stay: as in a path, they
/// need be no UTF-8.
std::string json_string(std::string_view text);

}  // namespace datastates
