"""Bytes gone wrong: mutations of real ones."""

from __future__ import annotations

import random

__all__ = ["mutated"]

# What makes lengths and indices large, and means something in JSON.
INTERESTING = b"\x00\x01\x7f\x80\xff" + b'019-.eE{}[],:"\\nt'


def mutated(data: bytes, chance: random.Random) -> bytes:
    """``data`` with one to three bytes or stretches flipped, put in, cut out, copied or swapped."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(changed) + 1)
        length = min(len(changed) - at, chance.choice((1, 1, 1, 2, 4, 8, 30, 300)))
        how = chance.randrange(7)
        if how == 0 and at < len(changed):
            changed[at] ^= 1 << chance.randrange(8)
        elif how == 1 and at < len(changed):
            changed[at] = chance.choice(INTERESTING)
        elif how == 2:
            changed[at:at] = chance.randbytes(length or 1)
        elif how == 3:
            changed[at:at] = bytes([chance.choice(INTERESTING)]) * chance.choice((1, 2, 300))
        elif how == 4:
            del changed[at : at + length]
        elif how == 5:
            begin = chance.randrange(len(changed) + 1)
            changed[at:at] = changed[begin : begin + length]
        else:
            begin = chance.randrange(len(changed) + 1)
            changed[at : at + length] = data[begin : begin + length]
    return bytes(changed)
