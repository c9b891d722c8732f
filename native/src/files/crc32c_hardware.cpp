// This file alone is compiled with the CPU's CRC instructions enabled (see CMakeLists.txt).

#include "files/crc32c_hardware.h"

#include <cstring>

#include "files/crc32c_polynomial.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#endif

namespace datastates {

#if defined(__x86_64__) || defined(__aarch64__)

namespace {

#if defined(__x86_64__)
inline std::uint64_t step8(std::uint64_t state, std::uint64_t word) {
    return _mm_crc32_u64(state, word);
}
inline std::uint32_t step1(std::uint32_t state, std::uint8_t byte) {
    return _mm_crc32_u8(state, byte);
}
#else
inline std::uint64_t step8(std::uint64_t state, std::uint64_t word) {
    return __crc32cd(static_cast<std::uint32_t>(state), word);
}
inline std::uint32_t step1(std::uint32_t state, std::uint8_t byte) {
    return __crc32cb(state, byte);
}
#endif

inline std::uint64_t load8(const std::byte* data) {
    std::uint64_t word = 0;
    std::memcpy(&word, data, sizeof word);
    return word;
}

// The instruction takes three cycles, but one can start every cycle. So three neighbouring lanes go
// at once; then a lane's register is moved past the lane that follows it, and the two are added.
constexpr int kLongLog2 = 13;
constexpr int kShortLog2 = 8;
constexpr RegisterMap kPastLong = zeros_map(kLongLog2);
constexpr RegisterMap kPastShort = zeros_map(kShortLog2);

inline std::uint32_t three_lanes(std::uint32_t state, const std::byte* data, std::size_t lane,
                                 const RegisterMap& past_lane) {
    std::uint64_t first = state;
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (const std::byte* const end = data + lane; data != end; data += 8) {
        first = step8(first, load8(data));
        second = step8(second, load8(data + lane));
        third = step8(third, load8(data + 2 * lane));
    }
    state =
        apply(past_lane, static_cast<std::uint32_t>(first)) ^ static_cast<std::uint32_t>(second);
    return apply(past_lane, state) ^ static_cast<std::uint32_t>(third);
}

}  // namespace

std::uint32_t crc32c_hardware(std::uint32_t state, const std::byte* data, std::size_t size) {
    constexpr std::size_t kLong = std::size_t{1} << kLongLog2;
    constexpr std::size_t kShort = std::size_t{1} << kShortLog2;
    for (; size >= 3 * kLong; size -= 3 * kLong, data += 3 * kLong) {
        state = three_lanes(state, data, kLong, kPastLong);
    }
    for (; size >= 3 * kShort; size -= 3 * kShort, data += 3 * kShort) {
        state = three_lanes(state, data, kShort, kPastShort);
    }
    std::uint64_t wide = state;
    for (; size >= 8; size -= 8, data += 8) wide = step8(wide, load8(data));
    state = static_cast<std::uint32_t>(wide);
    for (; size > 0; --size, ++data) state = step1(state, std::to_integer<std::uint8_t>(*data));
    return state;
}

const bool has_crc32c_hardware = true;

#else

std::uint32_t crc32c_hardware(std::uint32_t state, const std::byte* /*data*/,
                              std::size_t /*size*/) {
    return state;
}

const bool has_crc32c_hardware = false;

#endif

}  // namespace datastates
