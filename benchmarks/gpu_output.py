"""Results as text, JSON and, where matplotlib is there, a picture: nothing else needs to be installed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["drawable", "gpu", "print_table", "write_json"]


def gpu() -> dict[str, Any]:
    """What is to be said of the device. Makes the process use it."""
    if not torch.cuda.is_available():
        return {"device": "cpu", "cuda": None}
    return {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for first, *others in lines:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print("  ".join([first.ljust(widths[0]), *cells]))
    print(flush=True)


def drawable(path: Path | None) -> Path | None:
    """``path``, if a picture can be drawn; says so at once if not."""
    if path is not None:
        try:
            import matplotlib.pyplot  # noqa: F401
        except ImportError as error:
            print(f"{path} will not be drawn: {error}", flush=True)
            return None
    return path


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.{os.getpid()}")
    written.write_text(json.dumps(document, indent=1) + "\n")
    written.replace(path)
    print(f"written: {path}", flush=True)
