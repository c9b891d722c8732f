"""Failpoints armed for the length of a block, in this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from dcp_datastates.io import engine
from dcp_datastates.storage import failpoints

__all__ = ["armed", "armed_on", "fired"]

_LOG = failpoints.LOG_VARIABLE


@contextlib.contextmanager
def armed(entries: str, *, natively: bool = False, log: Path | None = None) -> Iterator[None]:
    """``entries`` as in ``DCP_DATASTATES_FAILPOINTS``, for Python's failpoints.

    The engine keeps those that it is made with. ``natively`` ends the process's engine, so that the block's
    has them, and the next has not; nothing may be under way then.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, failpoints.VARIABLE, entries)
        if log is not None:
            patch.setitem(os.environ, _LOG, str(log))
        failpoints.reload()
        if natively:
            engine._shut_down()
        try:
            yield
        finally:
            patch.undo()
            failpoints.reload()
            if natively:
                engine._shut_down()


@contextlib.contextmanager
def armed_on(rank: int, entries: str, log: Path, *, natively: bool = False) -> Iterator[None]:
    """:func:`armed` on one rank; on every rank, AssertionError unless all entries had fired. Collective."""
    mine = dist.get_rank() == rank
    with armed(entries, natively=natively, log=log) if mine else contextlib.nullcontext():
        yield
    dist.barrier()
    missing = {entry.partition("=")[0].partition("@")[0] for entry in entries.split(";")}
    missing -= set(fired(log))
    assert not missing, f"{missing} never fired on rank {rank}, so this shows nothing"


def fired(log: Path) -> list[str]:
    """The failpoints that have fired, by their log."""
    return log.read_text().split() if log.exists() else []
