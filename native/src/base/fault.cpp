#include "base/fault.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace datastates {
namespace {

std::string system_words(int error) {
    // strerror_r, because the categories of <system_error> are static objects, which a thread must
    // not need while the process exits. (GNU's variant, which returns the text.)
    std::array<char, 128> buffer{};
    return strerror_r(error, buffer.data(), buffer.size());
}

}  // namespace

Fault out_of_memory(const char* operation) {
    return {.kind = FaultKind::kIo,
            .error = ENOMEM,
            .path = {},
            .offset = 0,
            .operation = operation,
            .detail = {}};
}

Fault shut_down() {
    return {.kind = FaultKind::kShutdown, .path = {}, .operation = {}, .detail = {}};
}

Fault cancelled() {
    return {.kind = FaultKind::kCancelled, .path = {}, .operation = {}, .detail = {}};
}

Fault not_transferred(std::string message, int error, std::string path) {
    return {.kind = FaultKind::kTransfer,
            .error = error,
            .path = std::move(path),
            .offset = 0,
            .operation = "transfer",
            .detail = std::move(message)};
}

Fault cache_lost() {
    return {.kind = FaultKind::kDevice,
            .path = {},
            .operation = "waiting for a device that hangs",
            .detail = "all segments of the host cache that this could use are lost to it"};
}

std::string_view kind_name(FaultKind kind) {
    switch (kind) {
        case FaultKind::kIo:
        case FaultKind::kTransfer:
            return "io";
        case FaultKind::kCorrupt:
            return "corrupt";
        case FaultKind::kCancelled:
            return "cancelled";
        case FaultKind::kShutdown:
            return "shutdown";
        case FaultKind::kLost:
            return "lost";
        case FaultKind::kTorn:
            return "torn";
        case FaultKind::kDevice:
            return "device";
    }
    return "io";
}

std::string describe(const Fault& fault) {
    if (fault.kind == FaultKind::kCancelled) return "the job was cancelled";
    if (fault.kind == FaultKind::kShutdown) return "the engine was shut down";
    if (fault.kind == FaultKind::kLost) return "memory was freed before it was read";
    if (fault.kind == FaultKind::kTorn) return "memory changed before it was read";
    if (fault.kind == FaultKind::kDevice) return fault.operation + " failed: " + fault.detail;
    std::string text = fault.operation;
    if (!fault.path.empty()) text += " of '" + fault.path + "'";
    if (fault.kind == FaultKind::kTransfer) return text + " failed: " + fault.detail;
    text += " failed at offset " + std::to_string(fault.offset) + ": ";
    if (fault.error != 0) {
        text += system_words(fault.error) + " (errno " + std::to_string(fault.error) + ")";
        if (!fault.detail.empty()) text += ", " + fault.detail;
    } else {
        text += fault.detail.empty() ? "the file is shorter than expected" : fault.detail;
    }
    return text;
}

}  // namespace datastates
