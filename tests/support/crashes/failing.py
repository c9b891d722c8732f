"""Failpoints armed for the length of a block, in this process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from dcp_datastates.io import engine
from dcp_datastates.ranks import failure_detector as detector
from dcp_datastates.storage import failpoints
from support.jobs.processes import Ended, run_ranks
from support.waiting import await_that

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


class Held:
    """A failpoint that a thread stops at: whether it is there, and whether it may go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def stop(self) -> None:
        self.reached.set()
        assert self.go_on.wait(120), "nothing let it go on"


@contextlib.contextmanager
def held(name: str, rank: int | None = None) -> Iterator[Held]:
    """This process, if it is the ``rank``, stops at Python's failpoint ``name`` the first time, until it may go on, or
    the block ends.
    """
    point, current = Held(), failpoints.current

    def hit(passed: str) -> int:
        if passed == name and not point.reached.is_set():
            point.stop()
        return current().hit(passed)

    with pytest.MonkeyPatch.context() as patch:
        if rank is None or rank == dist.get_rank():
            patch.setattr(failpoints, "current", lambda: SimpleNamespace(hit=hit))
        try:
            yield point
        finally:
            point.go_on.set()


def variables(entries: str, log: Path) -> dict[str, str]:
    """The environment of a process with the failpoints ``entries``, which notes in ``log`` those that fire."""
    return {failpoints.VARIABLE: entries, _LOG: str(log)}


def fired(log: Path) -> list[str]:
    """The failpoints that have fired, by their log."""
    return log.read_text().split() if log.exists() else []


def run_killing(
    point: str, victim: int, body: str, world: int, scratch: Path, **arguments: Any
) -> list[Ended]:
    """:func:`run_ranks`, of which the ``victim`` is killed at the failpoint ``point``: what became of the others."""
    log = scratch / f"fired-{body.rpartition(':')[2]}"
    environments = [variables(f"{point}=kill", log) if n == victim else {} for n in range(world)]
    ended = run_ranks(body, world, scratch, environments=environments, **arguments)
    assert point.partition("@")[0] in fired(log), f"{point} was never passed: {ended[victim]}"
    assert ended[victim].killed
    return [one for one in ended if one.rank != victim]


@contextlib.contextmanager
def silence(seconds: float) -> Iterator[None]:
    """In this process a rank that is silent for ``seconds``, and not for as long as in earnest, is lost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detector, "SILENCE_SECONDS", seconds)
        yield


def await_fired(log: Path, name: str, seconds: float = 100.0) -> None:
    await_that(lambda: name in fired(log), seconds, f"{name} was never passed")


def stop(pid: int) -> None:
    """Stop a process, but not in the middle of a request to a store that is a file: it would hold its lock."""
    for _ in range(20):
        os.kill(pid, signal.SIGSTOP)
        await_that(lambda: _state(pid) in "Tt")
        if _store_is_free():
            return
        go_on(pid)
        time.sleep(0.03)
    raise AssertionError("the store is locked whenever the rank is stopped")


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _store_is_free() -> bool:
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.FileStore):
        return True
    with Path(store.path).open("rb") as file:
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.005)
            else:
                return True
    return False
