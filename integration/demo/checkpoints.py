"""Directories of checkpoints: ``step-N``, committed when ``.metadata`` is in it."""

from __future__ import annotations

import shutil
from pathlib import Path

_PREFIX = "step-"


def step_path(root: Path, iteration: int) -> Path:
    return root / f"{_PREFIX}{iteration}"


def is_committed(checkpoint: Path) -> bool:
    """``.metadata`` is published last, and atomically: with it the checkpoint is whole."""
    return (checkpoint / ".metadata").is_file()


def has_begun(checkpoint: Path) -> bool:
    """Whether any file of the save has been created."""
    return any(path.is_file() for path in checkpoint.rglob("*"))


def size_on_storage(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


def committed_iterations(root: Path) -> list[int]:
    """Iterations whose checkpoints are committed, oldest first."""
    return sorted(
        int(path.name.removeprefix(_PREFIX))
        for path in root.glob(f"{_PREFIX}*")
        if is_committed(path)
    )


def newest_committed(root: Path) -> int | None:
    """The iteration to resume from, or None: start from nothing."""
    iterations = committed_iterations(root)
    return iterations[-1] if iterations else None


def retain(root: Path, count: int) -> None:
    """Remove all committed checkpoints but the newest ``count``; what is not committed stays.

    The commit mark goes first, so that a kill in between leaves no checkpoint that looks whole.
    """
    for iteration in committed_iterations(root)[:-count]:
        path = step_path(root, iteration)
        (path / ".metadata").unlink()
        shutil.rmtree(path)
