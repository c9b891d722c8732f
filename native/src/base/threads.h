// Starting the engine's threads.

#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <thread>

namespace datastates {

/// Starts a thread called `name` (15 characters at most) that runs `body`. It blocks all signals
/// that others send: they are for the interpreter's threads, and must not interrupt system calls
/// here.
std::jthread start_thread(const std::string& name, std::function<void()> body);

/// Whom the system serves first, of those that read and write at one device.
enum class IoPriority : std::uint8_t {
    kNormal,
    kLow,   ///< after all others of the usual class
    kIdle,  ///< when no other process wants the device
};

/// Sets that of the calling thread, if the system and the device's scheduler know any.
void set_io_priority(IoPriority priority) noexcept;

}  // namespace datastates
