// File operations that can be made to fail, and that leave a trace, as the environment asks.

#pragma once

#include <memory>
#include <string>

#include "files/file_ops.h"

namespace datastates {

/// What to do to file operations. Empty strings: nothing.
struct Watch {
    std::string failpoints;  ///< entries; failpoints.h has the syntax
    std::string log_path;    ///< gets a line before each action
    std::string trace_path;  ///< gets a line for each operation of a save that was done
};

/// `inner`, watched; `inner` itself if there is nothing to do. Throws std::invalid_argument for a
/// failpoint that is none. Each of these has a failpoint `.before` and, if it succeeds, one
/// `.after`:
///
///     flush.open  flush.allocate  flush.write  flush.truncate  flush.close      a file being
///     written sync.data  sync.directory                                                fdatasync,
///     fsync restore.open  restore.read                                               a file being
///     read read                              a copy thread gathering sources into a segment
///
/// An error before: the call is not made. An error after: it is made, traced, and then reported as
/// failed. Descriptors do not leak: an open that is made to fail afterwards is undone but for the
/// file it created, and a close that is made to fail closes all the same, as close(2) does.
std::shared_ptr<FileOps> watched_file_ops(std::shared_ptr<FileOps> inner, const Watch& watch);

/// The system's file operations; watched, if DCP_DATASTATES_FAILPOINTS or DCP_DATASTATES_TRACE is
/// set now. Throws std::invalid_argument.
std::shared_ptr<FileOps> default_file_ops();

}  // namespace datastates
