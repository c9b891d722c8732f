"""Directories of checkpoints, what saves leave in them, and ways to damage one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from support.state.checkpoints import committed, save
from support.state.files import data_files, flip_bit
from support.state.metadata import decision_of, with_format

NEWER = "1fffffffffffffff-00000001"
OLDER = "0000000000000001-00000001"


def state_of(number: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(number)), "step": number}


def make_root(root: Path) -> Path:
    """Three checkpoints, saved in the order of their names; and things that are none."""
    for number in (9, 10, 11):
        save(state_of(number), root / f"step-{number}")
    (root / "logs").mkdir()
    (root / "logs" / "events.txt").write_text("x")
    (root / "notes.txt").write_text("x")
    return root


def save_stock(path: Path) -> None:
    dcp.save(state_of(0), storage_writer=dcp.FileSystemWriter(path), no_dist=True)


def committed_names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if committed(path))


def uncommitted(path: Path, name: str = NEWER, size: int = 100) -> Path:
    """What a save that has not committed has on storage."""
    folder = path / name
    folder.mkdir(parents=True)
    (folder / "r00000-0.safetensors").write_bytes(b"x" * size)
    return folder


def damage_metadata(path: Path) -> None:
    flip_bit(decision_of(path), 50)


def cut_metadata(path: Path) -> None:
    os.truncate(decision_of(path), 100)


def cut(path: Path) -> None:
    file = data_files(path)[0]
    os.truncate(file, file.stat().st_size - 1)


def grow(path: Path) -> None:
    with data_files(path)[0].open("ab") as file:
        file.write(b"x")


def lose(path: Path) -> None:
    data_files(path)[0].unlink()


def lose_all(path: Path) -> None:
    for file in data_files(path):
        file.unlink()


def another_version(path: Path) -> None:
    file = decision_of(path)
    file.write_bytes(with_format(file.read_bytes(), 99))


STRUCTURAL = [damage_metadata, cut_metadata, cut, grow, lose, lose_all, another_version]
