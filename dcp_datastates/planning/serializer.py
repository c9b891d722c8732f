"""Serializes objects as ``torch.save`` does. Keeps the bytes of small values, which recur from save to save."""

from __future__ import annotations

import functools
import io
import math
from typing import Any, Final

import torch

__all__ = ["serialize"]

_SHORT: Final = 256
"""Longest string (characters) and number (bits) whose bytes are kept."""


def serialize(value: Any) -> bytes:
    """``value`` as ``torch.save`` writes it. Any thread may call this."""
    return _kept(value) if _recurs(value) else _saved(value)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


_kept = functools.lru_cache(maxsize=4096, typed=True)(_saved)


def _recurs(value: Any) -> bool:
    """Whether it is likely to recur, and equal to no value of its type with other bytes."""
    kind = type(value)
    if kind is float:
        return not math.isnan(value) and repr(value) != "-0.0"
    if kind is str:
        return len(value) <= _SHORT
    if kind is int:
        return bool(value.bit_length() <= _SHORT)
    return value is None or kind is bool
