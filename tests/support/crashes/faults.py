"""One save with a fault between saves without: what every rank is told, what is left, and the next save."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dcp_datastates.errors import CommitOutcomeUnknown, DataStatesError
from support.crashes.residue import Residue, assert_nothing_left, entries
from support.jobs.groups import gathered, own_group
from support.state.checkpoints import async_save, attempts, causes
from support.state.saving import number_at, part, save_over
from support.waiting import await_that

ELEMENTS = 20_000
LIMIT_SECONDS = 40.0
"""No rank may wait longer for the outcome of a save with a fault, on a machine that is busy with others."""

OLD, NEW, NEXT = 2, 3, 4


@dataclass(frozen=True)
class Told:
    """One error that a rank was told of: DCP may wrap several."""

    kind: str
    text: str
    ours: bool
    unknown: bool

    @staticmethod
    def of(error: BaseException) -> list[Told]:
        ranks = "".join(f"rank {rank}; " for rank in getattr(error, "failures", {}))
        return [
            Told(
                type(cause).__name__,
                f"{ranks}{cause}",
                isinstance(cause, DataStatesError),
                isinstance(cause, CommitOutcomeUnknown),
            )
            for cause in causes(error)
        ]


def assert_tidy(path: Path, world: int) -> None:
    """One checkpoint is at ``path``, and nothing else."""
    await_that(lambda: len(attempts(path)) == 1, otherwise="an older attempt is left behind")
    (attempt,) = attempts(path)
    files = [f"{attempt.name}/r{rank:05}-0.safetensors" for rank in range(world)]
    decision = f"{attempt.name}/decision"
    assert entries(path) == sorted([".metadata", attempt.name, decision, *files])


def fault_between_saves(
    path: Path,
    fault: contextlib.AbstractContextManager[Any],
    *words: str,
    plainly: bool = False,
    elements: int = ELEMENTS,
    during: Callable[[], None] = lambda: None,
    afterwards: Callable[[], None] = lambda: None,
    **options: Any,
) -> list[list[Told] | None]:
    """Save twice; save with ``fault``; save once more. What every rank was told of the third, None: of its
    commit. Collective.

    Holds in any case: a rank that is told of a commit finds it; one that is told of a failure finds the old
    checkpoint; errors are this package's, and have all of ``words``; nothing is left; the last save is
    committed, and leaves nothing of what the others left.

    Args:
        plainly: by ``dcp.async_save`` in wait mode, and not the package's; errors are then wrapped.
        during: called between the save's call and its result.
        afterwards: called with the result there, before this rank waits for the others.
    """
    world = dist.get_world_size()
    group = own_group() if plainly else None

    def begin(number: int, **options: Any) -> Future[Any]:
        options = {"reads": "immediate", **options}
        state = part(number, elements)
        if plainly:
            return async_save(state, path, group=group, **options)
        return save_over(state, path, **options)

    for number in (OLD - 1, OLD):
        begin(number).result(60)
    assert number_at(path, world, elements) == OLD
    dist.barrier()
    before = Residue.now()
    dist.barrier()
    with fault:
        began = time.monotonic()
        try:
            future = begin(NEW, **options)
            during()
            told = future.exception(LIMIT_SECONDS)
        except DataStatesError as error:  # the call itself
            told = error
        assert time.monotonic() - began < LIMIT_SECONDS
        afterwards()
        dist.barrier()
        found = number_at(path, world, elements)
        dist.barrier()
    everyone = gathered(None if told is None else Told.of(told))
    _assert_true(everyone, found)
    _assert_told_well(everyone, words, plainly)
    del told
    assert_nothing_left(before, f"after {everyone}")
    dist.barrier()
    begin(NEXT).result(60)
    assert number_at(path, world, elements) == NEXT
    dist.barrier()
    assert_tidy(path, world)
    assert_nothing_left(before, "after the next save")
    dist.barrier()
    return everyone


def _assert_true(everyone: list[Any], found: int | None) -> None:
    """What the ranks were told is so, and they were not told both."""
    assert found in (OLD, NEW), f"checkpoint {found} is there: {everyone}"
    for told in everyone:
        if told is None:
            assert found == NEW, f"told of a commit that is not there: {everyone}"
        elif not any(error.unknown for error in told):
            assert found == OLD, f"told of a failure, and it is there: {everyone}"


def _assert_told_well(everyone: list[Any], words: tuple[str, ...], plainly: bool) -> None:
    for told in everyone:
        for error in told or ():
            assert error.ours or plainly, f"not an error of this package: {error}"
            for word in words:
                assert word in error.text, f"{word!r} is not in the message: {error}"
