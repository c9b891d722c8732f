// Why a job failed, as a value: it crosses threads, and Python decides what to raise.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace datastates {

enum class FaultKind : std::uint8_t {
    kIo,         ///< the system refused; `error` says why (0: the file ended too early)
    kCorrupt,    ///< stored bytes are not what was written
    kCancelled,  ///< the caller asked for it
    kShutdown,   ///< the engine was shut down
    kLost,       ///< memory that was to be read is not mapped any more
    kTorn,       ///< memory that was to be read has changed
    kDevice,     ///< an accelerator's driver refused; `error` is its code, `detail` its words
    kTransfer,   ///< the caller could not send or fetch; `detail` has its words; to Python, `kIo`
};

struct Fault {
    FaultKind kind = FaultKind::kIo;
    int error = 0;
    std::string path;
    std::uint64_t offset = 0;
    std::string operation;
    std::string detail;  ///< what `error` does not say
};

/// What a thread makes of std::bad_alloc. Allocates nothing if `operation` is a short word.
Fault out_of_memory(const char* operation);

/// The engine was shut down, or is about to be.
Fault shut_down();

/// The caller asked for it.
Fault cancelled();

/// The caller could not send a file, or fetch from it, and says why.
Fault not_transferred(std::string message, int error, std::string path);

/// What is left to say when devices that hang have all memory that a job would need.
Fault cache_lost();

std::string_view kind_name(FaultKind kind);

/// All of it in a sentence.
std::string describe(const Fault& fault);

}  // namespace datastates
