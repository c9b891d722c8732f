"""The kill matrix as a table, put together from what its cells reported to the run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["PROPERTY", "matrix_lines"]

PROPERTY = "kill matrix cell"
"""Name of the property of a test's report with its cell: failpoint, kind, found, seconds."""

_COLUMNS = ("coordinator", "other")
_NOT_RUN = "not run"


def _text(cell: dict[str, Any]) -> str:
    if cell["seconds"] is None:
        return str(cell["found"])
    return f"{cell['found']}, {cell['seconds']:.1f} s"


def matrix_lines(reports: Iterable[Any], points: Iterable[Any]) -> list[str]:
    """The table of all ``points`` (see ``support.crashes.cells``); empty if no report is of a cell.

    A cell has what was found at the path (old or new), and how long after the death the last survivor
    raised, if any did: where the save was committed none need to.
    """
    cells: dict[tuple[str, str], str] = {}
    for report in reports:
        for name, cell in report.user_properties:
            if (
                name == PROPERTY
            ):  # the last one counts: before a cell is run it reports that it failed
                cells[cell["failpoint"], cell["kind"]] = _text(cell)
    if not cells:
        return []
    lines = [("failpoint", *_COLUMNS)]
    for point in points:
        row = [
            cells.get((point.name, kind), _NOT_RUN) if kind in point.kinds else "n/a"
            for kind in _COLUMNS
        ]
        if any(text not in (_NOT_RUN, "n/a") for text in row):
            lines.append((point.name, *row))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
