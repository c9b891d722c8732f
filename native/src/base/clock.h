// The clock of all deadlines and durations.

#pragma once

#include <chrono>

namespace datastates {

using Clock = std::chrono::steady_clock;

}  // namespace datastates
