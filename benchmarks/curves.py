"""Curves of how planning grows with the number of ranks, and the power with which it does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["draw", "exponent"]


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The slope of a line through all points in logarithms (least squares); nan for fewer than two."""
    if len(points) < 2:
        return math.nan
    x, y = np.log(np.array(points)).T
    return float(np.polyfit(x, y, 1)[0])


def draw(record: dict[str, Any], path: Path) -> bool:
    """The coordinator's and each rank's time over ranks, for the most tensors; False without matplotlib."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    tensors = max(row["tensors"] for row in record["rows"])
    figure, panels = plt.subplots(1, 2, figsize=(13, 5.2), layout="constrained")
    parts = (("coordinator", "on the coordinator"), ("rank", "on each rank"))
    for panel, (part, title) in zip(panels, parts, strict=True):
        for entry in record["exponents"]:
            if entry["tensors"] == tensors:
                _draw_series(panel, record["rows"], entry, part)
        panel.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds")
        panel.set_title(f"Planning one save {title}: {tensors} sharded tensors")
        panel.grid(visible=True, which="major", alpha=0.3)
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def _draw_series(panel: Any, rows: list[dict[str, Any]], entry: dict[str, Any], part: str) -> None:
    key = ("planner", "save", "tensors")
    mine = [row for row in rows if all(row[name] == entry[name] for name in key)]
    planners = list(dict.fromkeys(row["planner"] for row in rows))
    panel.plot(
        [row["ranks"] for row in mine],
        [row[f"{part}_seconds"] for row in mine],
        marker="o",
        linestyle="-" if entry["save"] == "first" else "--",
        color=f"C{planners.index(entry['planner'])}",
        label=f"{entry['planner']}, {entry['save']}: ranks^{entry[part]:.2f}",
    )
