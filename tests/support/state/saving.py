"""Numbered checkpoints saved one over the other, and told apart again. Bodies of jobs on ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import dcp_datastates
from dcp_datastates import track
from dcp_datastates.errors import CheckpointNotFoundError
from dcp_datastates.ranks.rank_set import rank_set_of
from dcp_datastates.storage import operations
from support.state.checkpoints import CACHE, assert_same, attempts, causes, load_everything
from support.waiting import await_that


def save_over(
    state: dict[str, Any], path: Path | str, *, planner: Any = None, **options: Any
) -> Future[Any]:
    """Start to save ``state`` at ``path``; the future of its commit. The one place that knows how."""
    if planner is not None:
        options["planner"] = planner
    response = dcp_datastates.async_save(state, path, **{"host_cache_size": CACHE, **options})
    return response.upload_completion


# --- numbered checkpoints -----------------------------------------------------------------------

SMALL, DEFERRED = 600, 20_000
"""Elements of float32: copied at the call, or read later if an optimizer owns them."""


def _ours(number: int, rank: int, elements: int) -> torch.Tensor:
    return torch.arange(elements, dtype=torch.float32) + 1000.0 * number + 100.0 * rank


def checkpoint(number: int, world: int, elements: int) -> dict[str, Any]:
    """All of checkpoint ``number``: no two share a byte of data."""
    return {
        "object": {"number": number, "text": f"checkpoint {number}"},
        "shared": torch.full((300,), float(number)),
        **{f"weight{rank}": _ours(number, rank, elements) for rank in range(world)},
    }


def part(number: int, elements: int) -> dict[str, Any]:
    """This rank's part of checkpoint ``number``, its weight owned by an optimizer."""
    weight = torch.nn.Parameter(_ours(number, dist.get_rank(), elements))
    track(torch.optim.SGD([weight], lr=1.0))
    return {
        "object": {"number": number, "text": f"checkpoint {number}"},
        "shared": torch.full((300,), float(number)),
        f"weight{dist.get_rank()}": weight,
    }


def number_at(path: Path | str, world: int, elements: int | Callable[[int], int]) -> int | None:
    """Which checkpoint is at ``path``, whole; None if none is. Raises for anything in between.

    ``elements`` may depend on the number.
    """
    logging.disable(logging.WARNING)  # DCP logs a stack for each checkpoint that it does not find
    try:
        found = load_everything(path)
    except CheckpointException as error:
        if all(isinstance(cause, CheckpointNotFoundError) for cause in causes(error)):
            return None
        raise
    finally:
        logging.disable(logging.NOTSET)
    number = found["object"]["number"]
    size = elements(number) if callable(elements) else elements
    assert_same(found, checkpoint(number, world, size))
    return number


# --- bodies of jobs -------------------------------------------------------------------------------


def commit_checkpoint(path: str, number: int, elements: int) -> None:
    """Save, load, and leave when what other attempts left in a directory is gone."""
    save_over(part(number, elements), path, reads="immediate").result(60)
    if dist.get_rank() == 0:
        assert number_at(path, dist.get_world_size(), elements) == number
        await_that(lambda: "://" in path or len(attempts(path)) == 1)
    dist.barrier()


def save_traced(path: str, number: int, elements: int) -> None:
    """Save, and note in the trace when this rank was told that it is committed."""
    save_over(part(number, elements), path, reads="immediate").result(60)
    operations.tell(Path(path), f"checkpoint {number}")
    dist.barrier()


@dataclass(frozen=True)
class Report:
    """What a rank saw of a save."""

    committed: bool
    at: float
    """time.monotonic() when it knew."""
    kind: str = ""
    text: str = ""
    ours: bool = False
    """Whether the error is one of the package's own."""


def report_of(future: Future[Any], limit: float) -> Report:
    """What ``future`` comes to within ``limit`` seconds."""
    try:
        future.result(limit)
    except BaseException as error:
        found = causes(error)
        return Report(
            False,
            time.monotonic(),
            type(found[0]).__name__ if found else type(error).__name__,
            "; ".join(f"{type(cause).__name__}: {cause}" for cause in found) or repr(error),
            bool(found)
            and all(isinstance(c, dcp_datastates.errors.DataStatesError) for c in found),
        )
    return Report(True, time.monotonic())


def try_to_save(path: str, number: int, elements: int, limit: float) -> Report:
    """Save, whatever comes of it within ``limit`` seconds.

    The ranks have met before: of a rank that dies earlier, the others only see that it does not come.
    """
    incarnation = rank_set_of(None).incarnation
    assert incarnation.await_known(30)
    assert incarnation.await_all(30)
    failed: Future[Any] = Future()
    try:
        future = save_over(part(number, elements), path, reads="immediate")
    except BaseException as error:
        failed.set_exception(error)
        future = failed
    return report_of(future, limit)
