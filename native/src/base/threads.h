// Starting the engine's threads.

#pragma once

#include <functional>
#include <string>
#include <thread>

namespace datastates {

/// Starts a thread called `name` (15 characters at most) that runs `body`. It blocks all signals
/// that others send: they are for the interpreter's threads, and must not interrupt system calls
/// here.
std::jthread start_thread(const std::string& name, std::function<void()> body);

}  // namespace datastates
