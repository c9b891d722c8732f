// Reading a pickle without running it, to refuse what a checkpoint's metadata never holds.

#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

namespace datastates {

/// Containers and instances inside one another, at most. (Metadata of DCP reaches about ten.)
inline constexpr unsigned kMaxPickleDepth = 100;

/// Why `pickle` must not be given to an unpickler; nothing if it may be.
///
/// What passes uses only the opcodes that Python's pickler writes for plain data and instances of
/// plain classes (protocols 2 to 5), ends with its last byte, and cannot, whatever classes and
/// functions its names stand for:
/// - make an unpickler reserve memory by a number in the file: lengths lie within the data, and the
///   memo grows by one entry at a time;
/// - change anything but what it made itself: attributes are set once, on an instance just made and
/// never
///   on a class, on a function's result or through slots;
/// - call with other arguments than none, one integer, one string or one tuple of up to 64
/// integers;
/// - take more time or memory than in proportion to its length: no value holds itself, nesting ends
/// at
///   `kMaxPickleDepth`, keys are small, and tuples of integers do not collide by design in Python's
///   hash.
///
/// Which names are allowed is not judged here: that is the unpickler's part. Time and memory are
/// linear in the length (8 bytes for each value in the memo, 16 on the stack).
std::optional<std::string> scan_pickle(std::span<const std::byte> pickle);

}  // namespace datastates
