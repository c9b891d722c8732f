// What the bindings share: arguments from Python, waiting with signals, checks for forks.

#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "base/clock.h"
#include "base/fork_guard.h"
#include "base/status.h"
#include "python/python_gil.h"

namespace datastates {

namespace py = pybind11;

void bind_transfer(const py::module_& module);
void bind_jobs(const py::module_& module);
void bind_streams(const py::module_& module);
void bind_devices(const py::module_& module);
void bind_engine(const py::module_& module);
void bind_failpoints(const py::module_& module);
void bind_expected(const py::module_& module);

/// A host address that Python handed over as an integer.
inline std::byte* to_address(std::uint64_t address) {
    return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
}

/// A size or offset; `name` is for the message.
inline std::uint64_t to_size(std::int64_t value, const char* name) {
    if (value < 0)
        throw py::value_error(std::string(name) + "=" + std::to_string(value) + " is negative");
    return static_cast<std::uint64_t>(value);
}

/// The moment `seconds` from now; infinity is as good as a century.
inline Clock::time_point after(double seconds, const char* name) {
    constexpr double kForever = 100.0 * 365 * 86400;
    if (std::isnan(seconds)) throw py::value_error(std::string(name) + " is not a number");
    const std::chrono::duration<double> wait(std::clamp(seconds, 0.0, kForever));
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(wait);
}

/// Calls `wait(deadline)` without the GIL until it is true or `seconds` have passed; in slices, so
/// that the main thread sees signals, whose exceptions end the wait.
template <typename Wait>
bool wait_in_slices(double seconds, const Wait& wait) {
    constexpr std::chrono::milliseconds kSlice(100);
    const auto deadline = after(seconds, "timeout");
    while (true) {
        {
            const GilRelease release;
            if (wait(std::min(deadline, Clock::now() + kSlice))) return true;
        }
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        if (Clock::now() >= deadline) return false;
    }
}

/// What a step returned, or RuntimeError in the fault's words.
template <typename T>
T value_or_raise(Result<T> result) {
    if (!result.ok()) throw std::runtime_error(describe(result.fault()));
    return *std::move(result);
}

/// The object, or RuntimeError in a forked child.
template <typename T>
std::shared_ptr<T> required(const ProcessBound<T>& bound, const char* name) {
    if (!bound.here()) {
        throw std::runtime_error(std::string("this ") + name +
                                 " belongs to the process that this one was forked from");
    }
    return bound.get();
}

}  // namespace datastates
