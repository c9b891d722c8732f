// Copies of host memory that the program may unmap meanwhile: they fail then, and nothing crashes.

#pragma once

#include <span>

#include "memory/copies.h"

namespace datastates {

/// Makes all copies, and returns 0; or stops at one that fails, and returns its errno: EFAULT if
/// some of the memory to copy from is not mapped. The kernel makes the copies (process_vm_readv, or
/// a pipe where that is refused), so a page that is gone is an error code and no signal. Costs
/// about a quarter of memcpy's speed.
[[nodiscard]] int copy_guarded(std::span<const DeviceCopy> copies);

}  // namespace datastates
