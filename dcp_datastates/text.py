"""Numbers and dates as people read them."""

from __future__ import annotations

from datetime import datetime

__all__ = ["count", "date", "size"]


def count(number: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def size(nbytes: float) -> str:
    """Bytes in the largest unit that leaves 1 or more: ``512 B``, ``200.05 MiB``."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.2f} {unit}"
    return f"{nbytes / 1024:.2f} TiB"


def date(seconds: float | None) -> str:
    """Local date and time of seconds since the epoch; nothing for None."""
    return "" if seconds is None else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
