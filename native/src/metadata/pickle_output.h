// Writing opcodes of a pickle.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <span>
#include <stdexcept>

#include "metadata/pickle_opcodes.h"

namespace datastates {

/// A pickle of protocol 4 being written to memory: opcodes, in frames. Without frames, an unpickler
/// would read a file opcode by opcode.
class PickleOutput {
  public:
    /// As Python's pickler has them: a frame ends with the item that makes it this long.
    static constexpr std::size_t kFrameBytes = std::size_t{64} << 10U;
    static constexpr std::size_t kFrameHead = 9;

    explicit PickleOutput(std::span<std::byte> out) : out_(out) {
        op(Op::kProto);
        byte(4);
        begin_frame();
    }

    /// Before up to `bytes` are written: a place where a frame may end. `std::length_error` if
    /// there is no room; what is written without asking must be covered by what was asked for.
    void item(std::size_t bytes) {
        if (at_ - frame_ >= kFrameBytes) {
            end_frame();
            begin_frame();
        }
        if (out_.size() - at_ < bytes + kFrameHead) {
            throw std::length_error("the pickle is longer than its bound");
        }
    }

    void op(Op op) { byte(static_cast<std::uint8_t>(op)); }

    void ops(std::initializer_list<Op> several) {
        for (const Op each : several) op(each);
    }

    void bytes(std::span<const std::byte> data) {
        if (!data.empty()) std::memcpy(out_.data() + at_, data.data(), data.size());
        at_ += data.size();
    }

    void get(std::uint32_t memo) {
        if (memo <= std::numeric_limits<std::uint8_t>::max()) {
            op(Op::kBinGet);
            number(memo, 1);
        } else {
            op(Op::kLongBinGet);
            number(memo, 4);
        }
    }

    /// Of an integer that is not negative.
    void integer(std::int64_t value) {
        const auto bits = static_cast<std::uint64_t>(value);
        if (bits <= std::numeric_limits<std::uint8_t>::max()) {
            op(Op::kBinInt1);
            number(bits, 1);
        } else if (bits <= std::numeric_limits<std::uint16_t>::max()) {
            op(Op::kBinInt2);
            number(bits, 2);
        } else if (value <= std::numeric_limits<std::int32_t>::max()) {
            op(Op::kBinInt);
            number(bits, 4);
        } else {  // with its sign
            const auto width = static_cast<unsigned>(std::bit_width(bits) / 8) + 1;
            op(Op::kLong1);
            number(width, 1);
            number(bits, width);
        }
    }

    /// STOP; returns the bytes written.
    std::size_t finish() {
        op(Op::kStop);
        end_frame();
        return at_;
    }

  private:
    void byte(std::uint8_t value) { out_[at_++] = std::byte{value}; }

    void number(std::uint64_t value, unsigned width) {
        for (unsigned i = 0; i < width; ++i) byte(static_cast<std::uint8_t>(value >> (8 * i)));
    }

    void begin_frame() {
        op(Op::kFrame);
        number(0, 8);
        frame_ = at_;
    }

    void end_frame() {
        const std::size_t end = at_;
        at_ = frame_ - 8;
        number(end - frame_, 8);
        at_ = end;
    }

    std::span<std::byte> out_;
    std::size_t at_ = 0;
    std::size_t frame_ = 0;  // where its content begins
};

/// Items of a list or dict, a thousand at a time: an unpickler has them all on its stack.
class PickleBatches {
  public:
    static constexpr std::size_t kBatch = 1000;

    PickleBatches(PickleOutput& out, Op end) : out_(&out), end_(end) {}

    void item() {
        if (held_ == kBatch) finish();
        if (held_++ == 0) out_->op(Op::kMark);
    }

    /// The items so far; more may follow.
    void finish() {
        if (held_ > 0) out_->op(end_);
        held_ = 0;
    }

  private:
    PickleOutput* out_;
    Op end_;
    std::size_t held_ = 0;
};

}  // namespace datastates
