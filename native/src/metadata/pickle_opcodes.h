// The opcodes that Python's pickler writes for instances of plain classes, protocol 4.

#pragma once

#include <cstdint>

namespace datastates {

/// Names and values are those of Python's Lib/pickle.py.
enum class Op : std::uint8_t {
    kMark = '(',
    kEmptyTuple = ')',
    kStop = '.',
    kBinInt = 'J',
    kBinInt1 = 'K',
    kBinInt2 = 'M',
    kNone = 'N',
    kReduce = 'R',
    kEmptyList = ']',
    kBuild = 'b',
    kAppends = 'e',
    kBinGet = 'h',
    kLongBinGet = 'j',
    kTuple = 't',
    kSetItems = 'u',
    kEmptyDict = '}',
    kProto = 0x80,
    kNewObj = 0x81,
    kTuple1 = 0x85,
    kTuple2 = 0x86,
    kTuple3 = 0x87,
    kLong1 = 0x8a,
    kMemoize = 0x94,
    kFrame = 0x95,
};

}  // namespace datastates
