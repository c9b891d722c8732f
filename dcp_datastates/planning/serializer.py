"""Objects as ``torch.save`` writes them, each of the small ones once."""

from __future__ import annotations

import io
from typing import Any, Final

import torch

__all__ = ["Serializer"]

_KEPT: Final = 4096

_SHORT: Final = 256
"""Characters of a string, and bits of a number, that are likely to come again."""


class Serializer:
    """Serializes objects, and keeps the bytes of numbers and strings, which come again and again.

    Any thread: two that serialize the same value do the same work twice.
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
    """Equal for values whose bytes are equal; None for one that is not likely to come again."""
    kind = type(value)
    if kind is float:
        return kind, repr(value)  # tells -0.0 from 0.0, and a NaN is equal to itself
    if kind is str:
        return (kind, value) if len(value) <= _SHORT else None
    if kind is int:
        return (kind, value) if value.bit_length() <= _SHORT else None
    return (kind, value) if value is None or kind is bool else None
