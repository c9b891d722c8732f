"""Compares the figures in pages with the measurements that they come from.

A comment after a figure names its source: the file, the keys that lead to the value, and a factor if the page has
another unit. In a list, a key is the ``key`` or ``name`` of an element. This prints the figures that are stale:

    0.41 s<!-- from benchmarks/results/FILE.json: steps > default > seconds * 0.001 -->

    python docs/figures.py README.md docs/*.md
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

_FIGURE = re.compile(
    r"(?P<printed>-?[\d,]*\.?\d+)[^\d|<]*"
    r"<!-- from (?P<file>\S+): (?P<keys>[^*]+?)(?: \* (?P<factor>\S+))? -->"
)
_MARK = "<!-- from "


def figures(text: str) -> Iterator[tuple[str, str]]:
    """Each marked figure of a page: as printed, and as it should be. ValueError for a mark without a figure."""
    found = list(_FIGURE.finditer(text))
    if len(found) != text.count(_MARK):
        raise ValueError(f"{text.count(_MARK)} marks, and {len(found)} figures before them")
    for figure in found:
        value = json.loads((ROOT / figure["file"]).read_text())
        for key in figure["keys"].split(" > "):
            value = _entry(value, key)
        printed = figure["printed"]
        decimals = len(printed.partition(".")[2])
        yield printed, f"{value * float(figure['factor'] or 1):,.{decimals}f}"


def _entry(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return value[key]
    (entry,) = (each for each in value if key in (each.get("key"), each.get("name")))
    return entry


if __name__ == "__main__":
    for page in sys.argv[1:]:
        for printed, measured in figures(Path(page).read_text()):
            if printed != measured:
                print(f"{page}: {printed} is {measured}")
