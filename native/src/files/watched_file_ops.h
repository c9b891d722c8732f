// File operations that can be made to fail, and that leave a trace, as the environment asks.

#pragma once

#include <memory>
#include <string>

#include "files/failpoints.h"
#include "files/file_ops.h"

namespace datastates {

/// What to do to file operations. An empty path: no trace.
struct Watch {
    std::shared_ptr<Failpoints> failpoints;  ///< may be none
    std::string trace_path;  ///< gets a line for each operation of a save that was done
};

/// `inner`, watched; `inner` itself if there is nothing to do. Each of these has a failpoint
/// `.before` and, if it succeeds, one `.after`:
///
///     flush.open  flush.allocate  flush.write      a file being written
///     flush.truncate  flush.close                  the same
///     sync.data  sync.directory                    fdatasync, fsync
///     restore.open  restore.read                   a file being read
///     read                                         a copy thread gathering sources
///
/// An error before: the call is not made. An error after: it is made, traced, and then reported as
/// failed. Descriptors do not leak: an open that is made to fail afterwards is undone but for the
/// file it created, and a close that is made to fail closes all the same, as close(2) does.
std::shared_ptr<FileOps> watched_file_ops(std::shared_ptr<FileOps> inner, const Watch& watch);

}  // namespace datastates
