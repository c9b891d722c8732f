"""Serializes objects as ``torch.save`` does, and caches the bytes of small values."""

from __future__ import annotations

import io
from typing import Any, Final

import torch

__all__ = ["Serializer"]

_KEPT: Final = 4096

_SHORT: Final = 256
"""Longest string (characters) and number (bits) whose bytes are cached: small values are likely to recur."""


class Serializer:
    """Serializes objects, and caches the bytes of numbers and strings, which recur from save to save.

    Any thread may use it. Two threads may serialize the same value twice.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[type, Any], bytes] = {}

    def serialize(self, value: Any) -> bytes:
        """``value`` as ``torch.save`` writes it."""
        key = _key(value)
        if key is not None and (known := self._kept.get(key)) is not None:
            return known
        buffer = io.BytesIO()
        torch.save(value, buffer)
        data = buffer.getvalue()
        if key is not None:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            self._kept[key] = data
        return data


def _key(value: Any) -> tuple[type, Any] | None:
    """A cache key, equal for values with equal bytes; None for a value that is not likely to recur."""
    kind = type(value)
    if kind is float:
        return kind, repr(value)  # distinguishes -0.0 from 0.0, and makes a NaN equal to itself
    if kind is str:
        return (kind, value) if len(value) <= _SHORT else None
    if kind is int:
        return (kind, value) if value.bit_length() <= _SHORT else None
    return (kind, value) if value is None or kind is bool else None
