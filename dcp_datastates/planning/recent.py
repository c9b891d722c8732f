"""What was used last, by key."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

__all__ = ["KEPT", "Recent"]

KEPT: Final = 8
"""How many values are kept: a job may save several state dicts in turn, each with plans of its own."""

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Recent(Generic[_Key, _Value]):
    """The :data:`KEPT` values that were used last, by key. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._values: dict[_Key, _Value] = {}  # the latest used at the end

    def get(self, key: _Key) -> _Value | None:
        """The value of ``key``, which counts as used."""
        with self._lock:
            value = self._values.get(key)
            # Most often it is the latest already: then the key, which may be large, is not hashed again.
            if value is not None and value is not next(reversed(self._values.values())):
                self._values[key] = self._values.pop(key)
            return value

    def put(self, key: _Key, value: _Value) -> None:
        """Keep ``value``, in place of the one with this key or of the one that was used the longest ago."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = value
            if len(self._values) > KEPT:
                del self._values[next(iter(self._values))]
