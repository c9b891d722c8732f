// Copies of regions into memory, done at once.

#pragma once

#include <cstddef>
#include <cstdint>

#include "memory/transfer.h"

namespace datastates {

/// Copies the regions of `content` to `out`, which is where byte 0 of the stream goes. Returns when
/// done; large copies use a few threads of their own.
void gather(const StreamContent& content, std::byte* out);

}  // namespace datastates
