"""States for ``reuse="unchanged"``, of bytes that no other test has, and what lies at a checkpoint's path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import dcp_datastates as ds
from support.state.checkpoints import CACHE, attempts

__all__ = ["fresh", "linked", "save_reusing", "space", "written"]


def fresh(nbytes: int = 100_000, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A tensor of random bytes: nothing that this process has committed is equal to it."""
    return torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.uint8).view(dtype)


def save_reusing(state: dict[str, Any], path: Path, **options: Any) -> ds.SaveStats:
    return ds.save(state, path, **{"host_cache_size": CACHE, "reuse": "unchanged", **options})


def _files(path: Path) -> list[Path]:
    (attempt,) = attempts(path)
    return sorted(attempt.iterdir())


def linked(path: Path) -> list[Path]:
    """The files of earlier checkpoints in the one at ``path``."""
    return [file for file in _files(path) if file.suffix == ".linked"]


def written(path: Path) -> list[Path]:
    """The files that the save to ``path`` has written."""
    return [file for file in _files(path) if file.suffix == ".safetensors"]


def space(*roots: Path) -> int:
    """The bytes of all files below ``roots``, each counted once, however many names it has."""
    files = {
        (found.stat().st_dev, found.stat().st_ino): found.stat().st_size
        for root in roots
        for found in root.rglob("*")
        if found.is_file()
    }
    return sum(files.values())
