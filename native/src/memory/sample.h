// Digests of a few words of memory, to see (not to prove) whether it changed between two looks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace datastates {

/// One digest per region, of words at places drawn from `seed`; 0 for an empty region. Small
/// regions are digested whole. With `guarded`, memory that is not mapped (any more) gives 0, too.
std::vector<std::uint64_t> sample_words(std::span<const std::span<const std::byte>> regions,
                                        std::uint64_t seed, bool guarded = false);

}  // namespace datastates
