"""Jobs that save with ``reuse="unchanged"``, again and again, until a rank is killed. Bodies of jobs on ranks.

What checkpoint ``number`` holds follows from the number, so any process can check it.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dcp_datastates as ds
from dcp_datastates import track
from dcp_datastates.storage import operations
from support.state.checkpoints import CACHE, assert_same, load_everything

__all__ = ["checkpoint", "number_of", "save_linked_traced", "save_until_killed"]

SAVES = 6


def _bytes(seed: int, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def _of_rank(number: int, rank: int, scale: int) -> dict[str, Any]:
    """One tensor never changes, one in each save, and one in every third."""
    return {
        f"frozen{rank}": _bytes(rank, 60 * scale),
        f"seldom{rank}": _bytes(1000 * (number // 3) + rank, 20 * scale),
        f"trained{rank}": _bytes(-1000 * number - rank, 10 * scale).float(),
    }


def checkpoint(number: int, world: int, scale: int) -> dict[str, Any]:
    state: dict[str, Any] = {"number": number, "scale": scale}
    for rank in range(world):
        state |= _of_rank(number, rank, scale)
    return state


def number_of(path: Path, world: int) -> int:
    """Which checkpoint is at ``path``. AssertionError unless it loads whole."""
    found = load_everything(path)
    assert_same(found, checkpoint(found["number"], world, found["scale"]))
    return int(found["number"])


def _save(path: Path, number: int, scale: int) -> ds.SaveStats:
    state = _of_rank(number, dist.get_rank(), scale)
    trained = torch.nn.Parameter(state[f"trained{dist.get_rank()}"])
    state[f"trained{dist.get_rank()}"] = trained
    track(torch.optim.SGD([trained], lr=1.0))
    state |= {"number": number, "scale": scale}
    options = {"host_cache_size": CACHE, "read_window": "immediate", "reuse": "unchanged"}
    handle = ds.async_save(state, path, **options)
    handle.result(60)
    return handle.stats


def save_until_killed(root: str, log: str, seed: int) -> int:
    """Save to directories of their own or over one another, and keep two. Notes in ``log`` what was told, and what is
    about to be deleted. Returns how many saves have linked something.
    """
    chance, linked = random.Random(seed), 0

    def note(*words: object) -> None:
        with open(f"{log}.{dist.get_rank()}", "a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    for number in range(1, SAVES + 1):
        name = chance.choice(["latest", f"step-{number}"])
        note("begins", name, number)
        stats = _save(Path(root, name), number, 2000)
        note("told", name, number)
        linked += bool(stats.bytes_linked)
        if chance.random() < 0.4:
            note("retains", "-", 0)
            ds.retain(root, keep=2)
    return linked


def save_linked_traced(path: str, start: str, scale: int) -> None:
    """Save checkpoint 1, copy the tree to ``start``, and save checkpoint 2 over it; only the latter is in the trace."""
    trace, root = os.environ[operations.TRACE_VARIABLE], Path(path).parent
    _save(Path(path), 1, scale)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(root, start)
        os.truncate(trace, 0)
    dist.barrier()
    assert _save(Path(path), 2, scale).bytes_linked
    operations.tell(Path(path), "checkpoint 2")
    dist.barrier()


def save_unchanged_traced(path: str) -> None:
    """Save a state without objects twice: the second time, there is nothing to write."""
    state = {"w": _bytes(1, 50_000)}
    for number in "12":
        options = {"host_cache_size": CACHE, "reuse": "unchanged"}
        stats = ds.save(state, Path(path, number), **options)
    assert stats.bytes_linked == 50_000
    assert not stats.bytes_written
