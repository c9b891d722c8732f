"""Results as text and JSON: nothing else needs to be installed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def gpu() -> dict[str, Any]:
    """What is to be said of the device. Makes the process use it."""
    if not torch.cuda.is_available():
        return {"device": "cpu", "cuda": None}
    return {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each; the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for first, *others in (header, *rows):
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return lines


def replace_json(path: Path, document: dict[str, Any]) -> None:
    """All of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.{os.getpid()}")
    written.write_text(json.dumps(document, indent=1) + "\n")
    written.replace(path)
