"""Storage that does not answer any more: no call waits for it without a bound, other paths go on, and what is told of
the save stays true when storage comes back.

The first test lets each call into the operating system hang in turn that a save makes from Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs.scripts import HASTY_END, TWO_RANKS, run_script
from support.state.checkpoints import committed
from support.tiers import sampled
from support.waiting import await_that

import dcp_datastates as ds
from dcp_datastates import config
from dcp_datastates.commit import group
from dcp_datastates.errors import CommitOutcomeUnknown, DataStatesError
from dcp_datastates.storage.bounded import is_hung

BOUND = 0.25
"""The ``commit_timeout`` of these saves, in seconds: shorter than users may ask for, because hundreds of saves wait for
it."""

STRIDE = 17
"""Each test lets every so many-th call hang."""

LIMIT = 40
"""Seconds after which a wait counts as one without a bound."""

OPTIONS = {"host_cache_size": "64MiB", "commit_timeout": BOUND}


_BY_PATH = (
    *("access", "listdir", "lstat", "mkdir", "open", "rename", "rmdir", "scandir", "stat"),
    *("statvfs", "unlink"),
)
_BY_DESCRIPTOR = ("close", "fstat", "fsync", "write")


class Hanging:
    """Which call hangs, and what it was.

    Args:
        root: the directory that calls below it are counted for.
        first: the number of the first call that hangs, from 0; None: none does.
        only: whether later calls pass.
    """

    def __init__(self, root: Path, first: int | None, *, only: bool) -> None:
        self.calls = 0
        self.hung: str | None = None
        """The first call that hung; None if there were not as many."""
        self._root = str(root)
        self._first = first
        self._only = only
        self._lock = threading.Lock()
        self._released = threading.Event()

    def release(self) -> None:
        """Let the calls go on that hang."""
        self._released.set()

    def pass_(self, name: str, where: object) -> None:
        """A call is about to be made."""
        if not isinstance(where, (str, os.PathLike)) or not os.fspath(where).startswith(self._root):
            return
        with self._lock:
            number, self.calls = self.calls, self.calls + 1
            if self._first is None or number < self._first:
                return
            if self._only and number > self._first:
                return
            self.hung = self.hung or f"{name} of {os.path.basename(where)!r}"
        self._released.wait()


@contextlib.contextmanager
def hanging(root: Path, first: int | None = None, *, only: bool = False) -> Iterator[Hanging]:
    """Let calls below ``root`` hang, as :class:`Hanging` says; they are released when the block ends."""
    it = Hanging(root, first, only=only)

    def by_path(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(where: Any = None, *args: Any, **options: Any) -> Any:
            it.pass_(name, where)
            return call(where, *args, **options)

        return made

    def by_descriptor(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        link = os.readlink

        def made(descriptor: int, *args: Any) -> Any:
            with contextlib.suppress(OSError):
                it.pass_(name, link(f"/proc/self/fd/{descriptor}"))
            return call(descriptor, *args)

        return made

    with pytest.MonkeyPatch.context() as patch:
        for name in _BY_PATH:
            patch.setattr(os, name, by_path(name, getattr(os, name)))
        for name in _BY_DESCRIPTOR:
            patch.setattr(os, name, by_descriptor(name, getattr(os, name)))
        patch.setattr(fcntl, "flock", by_descriptor("flock", fcntl.flock))
        patch.setattr(io, "open", by_path("open", io.open))
        try:
            yield it
        finally:
            it.release()


def _save(path, number, **options):
    return ds.async_save({"w": torch.full((4096,), float(number))}, path, **{**OPTIONS, **options})


def _at(path):
    return ds.load(path)["w"].unique().tolist()


def _outcome(path, number, **options):
    """None if it was committed, else the error that the user sees."""
    try:
        _save(path, number, **options).result(LIMIT)
    except DataStatesError as error:  # a TimeoutError is none: the outcome never came
        return error
    return None


def _hang_one_call(root, first, only, overwrite):
    """A save over another during which calls hang; returns what hung, or None if there were fewer calls."""
    path, other = root / "hung" / "c", root / "elsewhere" / "c"
    path.parent.mkdir(parents=True)
    other.parent.mkdir()
    if overwrite:
        _save(path, 1, commit_timeout=LIMIT).result(LIMIT)
    with hanging(path.parent, first, only=only) as storage:
        told = _outcome(path, 2, overwrite=overwrite)
        refused = None if told is None else _outcome(path, 3, overwrite=overwrite)
        _save(other, 4, commit_timeout=LIMIT).result(LIMIT)
    await_that(lambda: not is_hung(path))
    before = [1.0] if overwrite else None
    now = _at(path) if committed(path) else None
    if told is None:
        assert now == [2.0], storage.hung
    elif isinstance(told, CommitOutcomeUnknown):
        assert now in ([2.0], before), storage.hung
    else:
        later = None if refused is None or isinstance(refused, CommitOutcomeUnknown) else [3.0]
        assert now in (before, [3.0] if refused is None else later or [3.0]), storage.hung
    assert _at(other) == [4.0]
    await_that(lambda: _outcome(path, 5, commit_timeout=LIMIT) is None)
    assert _at(path) == [5.0]
    return storage.hung or (told and "none: storage was slow by itself")


@pytest.mark.parametrize(
    ("only", "overwrite", "first"),
    sampled(itertools.product([False, True], [True, False], range(STRIDE)), keep=[(True, True, 3)]),
)
def test_whichever_call_hangs_the_save_ends_and_what_it_told_stays_true(
    only, overwrite, first, tmp_path, monkeypatch
):
    monkeypatch.setitem(config._CHECKS, "commit_timeout", lambda _, seconds: seconds)
    monkeypatch.setattr(group, "_TIDY_SECONDS", 2 * BOUND)
    told = []
    for call in itertools.count(first, STRIDE):
        hung = _hang_one_call(tmp_path / str(call), call, only, overwrite)
        if hung is None:
            break
        told.append(hung)
    assert told


HANGS = {
    "planning": "plan.mkdir.before@3",  # the first save makes two directories
    "files": "flush.write.before@2",
    "publication": "publish.link.before@2",
    "after the publication": "publish.sync_directory.before@2",
    "cleanup": "cleanup.before@2",
}


@pytest.mark.parametrize("where", sampled(HANGS, keep=["publication"]))
def test_a_process_ends_although_storage_hangs(where, tmp_path):
    ended = run_script(
        f"""
        import dcp_datastates as ds
        os.environ["DCP_DATASTATES_FAILPOINTS"] = "{HANGS[where]}=sleep:600"
        for number in range(3):
            state = {{"w": torch.full((100,), float(number))}}
            patience = 1 if number else 30
            ds.async_save(state, path, host_cache_size="64MiB", commit_timeout=patience, max_in_flight=1)
        print("called", flush=True)
        """,
        tmp_path / "c",
        preface=HASTY_END,
    )
    ended.assert_clean()
    assert ended.stdout == "called\n"
    assert committed(tmp_path / "c")


WRITES = {"one write": "flush.write.before@1", "every write": "flush.write.before"}
ENDS = {"one write": "sys.exit(3)", "every write": "os._exit(3)"}
"""``tests/unit/process/test_ending.py`` asks how a process ends in which every write hangs."""


@pytest.mark.parametrize("hangs", WRITES)
def test_while_a_data_file_hangs_saves_fail_in_time_and_training_and_the_process_go_on(
    hangs, tmp_path
):
    patience = (1, 30, 30) if hangs == "one write" else (1, 1, 1)
    ended = run_script(
        f"""
        import dcp_datastates as ds
        os.environ["DCP_DATASTATES_FAILPOINTS"] = "{WRITES[hangs]}=sleep:600"
        parameter = torch.nn.Parameter(torch.ones(24 << 20))  # more than the host cache
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        track(optimizer)
        parameter.grad = torch.ones_like(parameter)
        for number, patience in enumerate({patience}):
            handle = ds.async_save(
                {{"w": parameter}},
                f"{{path}}-{{number}}",
                host_cache_size="64MiB",
                commit_timeout=patience,
                exit_timeout=1,
            )
            optimizer.step()
            try:
                handle.result({LIMIT})
                print(number, "committed", flush=True)
            except ds.errors.DataStatesError as error:
                print(number, type(error).__name__, flush=True)
        {ENDS[hangs]}
        """,
        tmp_path / "c",
        preface=HASTY_END,
    )
    assert ended.returncode == 3, ended.stderr
    told = [line.split()[1] for line in ended.stdout.splitlines()]
    assert told[0] == "SaveStalledError", ended.stderr
    later = "committed" if hangs == "one write" else "SaveStalledError"
    assert told[1:] == [later, later], ended.stderr
    if hangs == "one write":
        assert f"a file operation for '{tmp_path / 'c'}-0" in ended.stderr, ended.stderr


COORDINATOR, OTHER = 0, 1
ON_TWO = {
    "the coordinator claims": (COORDINATOR, "plan.mkdir.before@3=sleep:600", None),
    "another rank looks for the attempt": (OTHER, "share.mkdir.before@2=sleep:600", None),
    "the coordinator publishes": (COORDINATOR, "publish.link.before@2=sleep:600", None),
    "a rank writes": (OTHER, "flush.write.before@2=sleep:600", None),
    "a rank settles for a dead coordinator": (
        OTHER,
        "settle.link.before=sleep:600",
        "publish.link.before@2=kill",
    ),
}


@pytest.mark.parametrize("where", sampled(ON_TWO, keep=["the coordinator publishes"]))
def test_two_ranks_are_told_soon_and_not_opposite_things_when_storage_hangs(where, tmp_path):
    victim, hangs, kills = ON_TWO[where]
    ended = run_script(
        f"""
        if rank == {victim}:
            os.environ["DCP_DATASTATES_FAILPOINTS"] = "{hangs}"
        elif {kills!r}:
            os.environ["DCP_DATASTATES_FAILPOINTS"] = {kills!r}
        for number in range(3):
            state = {{f"w{{rank}}": torch.full((100,), float(number))}}
            where = path if number < 2 else path + "-other"
            patience = 1 if number == 1 else 30
            try:
                ds.async_save(state, where, host_cache_size="64MiB", commit_timeout=patience).result()
                print("told", rank, number, "committed", flush=True)
            except ds.errors.DataStatesError as error:
                print("told", rank, number, type(error).__name__, error, flush=True)
            if {kills!r} and number == 1:
                os._exit(0)  # the store ends with the coordinator
        """,
        tmp_path / "c",
        preface=TWO_RANKS,
    )
    told = {}
    for line in ended.stdout.splitlines():
        if line.startswith("told"):
            _, rank, number, outcome, *_ = line.split()
            told.setdefault(int(number), {})[int(rank)] = outcome
    said = f"{ended.stdout}\n{ended.stderr}"
    assert told[0] == {0: "committed", 1: "committed"}, said
    outcomes = set(told[1].values())
    unknown = {"CommitOutcomeUnknown"}
    if kills:
        assert told[1] == {OTHER: "CommitOutcomeUnknown"}, said
        return
    assert sorted(told[1]) == [0, 1], said
    assert "committed" not in outcomes or outcomes <= {"committed", *unknown}, said
    assert told[2] == {0: "committed", 1: "committed"}, said
