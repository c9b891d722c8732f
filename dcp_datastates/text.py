"""Numbers, dates and names as people read them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime


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


def step_of(name: str) -> int | None:
    """The number at the end of a checkpoint's name."""
    match = re.search(r"[0-9]+$", name)
    return int(match[0]) if match else None


def numbers(named: Mapping[str, float]) -> str:
    """Numbers by name: ``loss 2.31, accuracy 0.5``."""
    return ", ".join(f"{name} {value:g}" for name, value in named.items())


def printable(text: object) -> str:
    """``text`` with escapes for what a terminal would obey or could not show, except for new lines.

    Names on storage may hold anything.
    """
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(
        each
        if each == "\n" or each.isprintable() or unicodedata.category(each) == "Zs"
        else each.encode("unicode_escape").decode()
        for each in plain
    )


def duration(seconds: float) -> str:
    """Seconds in the largest unit that leaves 1 or more: ``20 ms``, ``1.5 s``, ``2.3 h``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"


def columns(
    headers: Sequence[str], rows: Iterable[Sequence[object]], most: int | None = None
) -> list[str]:
    """The lines of a table: the headers and ``most`` rows (None: all). None is an empty cell.

    ``>`` at a header's end aligns its column to the right.
    """
    shown = [[_cell(value) for value in row] for row in rows]
    left_out = 0 if most is None else len(shown) - most
    table = [[header.rstrip(">") for header in headers], *shown[:most]]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "   ".join(
            cell.rjust(width) if header.endswith(">") else cell.ljust(width)
            for cell, width, header in zip(row, widths, headers, strict=True)
        )
        for row in table
    ]
    lines = [f"  {line}".rstrip() for line in lines]
    return [*lines, f"  … and {left_out} more"] if left_out > 0 else lines


def _cell(value: object) -> str:
    return "" if value is None else printable(value).replace("\n", "\\n")
