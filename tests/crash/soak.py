"""Many saves in one job, a few of them with a fault: nothing is lost, and nothing grows.

Faults are drawn and armed before the job starts (``name@N`` in the environment of one rank, the engine reads
it once), so the log of failpoints says in which save one fired. Planners that raise, ranks that sleep past the
commit's timeout, and saves that come too fast and are skipped are drawn by save.

Memory is measured after ``malloc_trim``: each gloo group brings threads, so arenas, that keep what is free. torch's
flight recorder is off: it fills a ring of 2,000 collectives, about 1.8 MiB. What grows then is gloo
itself, by about 60 bytes per collective, of which a save has two, and DCP's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.crashes.cells import NEVER
from support.crashes.failing import fired, held, variables
from support.crashes.faults import assert_tidy
from support.jobs.groups import gathered
from support.jobs.processes import run_ranks
from support.state.checkpoints import causes
from support.state.planners import FailingPlanner
from support.state.saving import number_at, part, report_of, save_over

from dcp_datastates.process.futures import finish_callbacks
from dcp_datastates.storage import failpoints

WORLD = 4
WARM_UP = 10
"""Saves of the largest size before any is counted, so that caches and arenas have been touched."""

MAX_ELEMENTS = 60_000
RESULT_SECONDS = 60

# Every one is passed once in a save, so that the N-th time is about the N-th save.
_COORDINATOR = (
    *("publish.create.before", "publish.write.after", "publish.sync_file.before"),
    *("publish.link.before", "publish.link.after", "publish.sync_directory.before"),
)
_EVERY_RANK = (
    *("flush.open.before", "flush.write.before", "flush.write.after", "flush.close.after"),
    *("sync.data.before", "sync.directory.before", "sync.directory.after", "read.before"),
    *("plan.before", "vote.before"),
)
_FULL = ("flush.allocate.before", "flush.write.before", "publish.write.before")
_SLOW = ("sync.data.after", "vote.after", "publish.create.after", "outcome.before")
"""Nothing else happens at these: a save that is slow at one of them is committed all the same."""
_STALLED = ("vote.before", "vote.after", "outcome.after")
_STALLED_SECONDS, _PATIENCE_SECONDS = 4.0, 1.5
_PLANNERS = ("create_local_plan", "create_global_plan", "finish_plan", "resolve_data")


@dataclass(frozen=True)
class Usage:
    """What the process holds."""

    rss: int
    tasks: int
    threads: int
    descriptors: int


@dataclass
class Figures:
    """What one rank saw."""

    seconds: float = 0.0
    committed: int = 0
    failed: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """What fired on this rank."""
    first: list[Usage] = field(default_factory=list)
    last: list[Usage] = field(default_factory=list)


@dataclass(frozen=True)
class _Fault:
    kind: str  # "planner", "EIO", "ENOSPC", "slow", "stalled" or "skipped"
    rank: int
    save: int
    where: str


def _drawn(saves: int, every: int, chance: random.Random) -> list[_Fault]:
    kinds = ("planner", "EIO", "ENOSPC", "slow", "stalled", "skipped")
    faults = []
    for number, save in enumerate(range(every, saves, every)):
        kind = kinds[number % len(kinds)]
        places = {
            "planner": _PLANNERS,
            "EIO": _EVERY_RANK + _COORDINATOR,
            "ENOSPC": _FULL,
            "slow": _SLOW,
            "stalled": _STALLED,
            "skipped": ("skipped",),
        }[kind]
        where = chance.choice(places)
        coordinator = where == "create_global_plan" or where in NEVER["other"]
        rank = 0 if coordinator else chance.randrange(WORLD)
        faults.append(_Fault(kind, rank, WARM_UP + save, where))
    return faults


def _armed(faults: Sequence[_Fault], rank: int) -> str:
    actions = {"EIO": "error:EIO", "ENOSPC": "error:ENOSPC", "slow": "sleep:0.5"}
    return ";".join(
        f"{fault.where}@{fault.save}={actions[fault.kind]}"
        for fault in faults
        if fault.rank == rank and fault.kind in actions
    )


@dataclass(frozen=True)
class Outcome:
    """The whole run."""

    drawn: int
    ranks: list[Figures]

    def __str__(self) -> str:
        one = self.ranks[0]
        fired = sum((figures.faults for figures in self.ranks), Counter())
        lines = [
            f"{one.committed} saves committed and loaded, {one.failed} failed, {one.seconds:.1f} s; "
            f"{fired.total()} of {self.drawn} faults fired: "
            + ", ".join(f"{count} {what}" for what, count in sorted(fired.items()))
        ]
        for rank, figures in enumerate(self.ranks):
            first, last = typical(figures.first), typical(figures.last)
            lines.append(
                f"rank {rank}: RSS {first.rss / 2**20:.1f} -> {last.rss / 2**20:.1f} MiB, "
                f"tasks {first.tasks} -> {last.tasks}, threads {first.threads} -> {last.threads}, "
                f"descriptors {first.descriptors} -> {last.descriptors}"
            )
        return "\n".join(lines)


def typical(usages: Sequence[Usage]) -> Usage:
    """Median of the memory; the fewest threads and descriptors: what leaks stays."""
    return Usage(
        int(statistics.median(usage.rss for usage in usages)),
        min(usage.tasks for usage in usages),
        min(usage.threads for usage in usages),
        min(usage.descriptors for usage in usages),
    )


def soak(saves: int, every: int, scratch: Path, seed: int, seconds: float) -> Outcome:
    """``saves`` saves on 4 ranks, a fault in each ``every``-th. AssertionError if a save is lost."""
    faults = _drawn(saves, every, random.Random(seed))
    by_save = {
        fault.save: fault for fault in faults if fault.kind in ("planner", "stalled", "skipped")
    }
    ended = run_ranks(
        "crash.soak:run",
        WORLD,
        scratch,
        environments=[
            {
                **variables(_armed(faults, rank), scratch / f"fired{rank}"),
                "TORCH_FR_BUFFER_SIZE": "0",
            }
            for rank in range(WORLD)
        ],
        seconds=seconds,
        path=str(scratch / "checkpoint"),
        saves=saves,
        by_save=by_save,
        seed=seed,
    )
    for one in ended:
        if one.error:  # the first to fail; the others' errors follow from it
            one.result()
    return Outcome(len(faults), [one.result() for one in ended])


# --- on a rank ------------------------------------------------------------------------------------


def run(path: str, saves: int, by_save: Mapping[int, _Fault], seed: int) -> Figures:
    """The job. All ranks draw the same sizes."""
    chance = random.Random(seed)
    figures = Figures()
    rank, log = dist.get_rank(), Path(os.environ[failpoints.LOG_VARIABLE])
    window = max(5, saves // 10)
    gc.collect()
    gc.freeze()
    there, size_there = None, 0
    began = time.monotonic()
    for place in range(1, WARM_UP + saves + 1):
        number = place
        elements = chance.randrange(MAX_ELEMENTS) if number > WARM_UP else MAX_ELEMENTS
        fault = by_save.get(number)
        fired_before = fired(log)
        number, committed = _save_with(fault, path, number, elements)
        fired_now = fired(log)[len(fired_before) :]
        figures.faults.update(fired_now)
        if fault is not None and fault.rank == rank:
            figures.faults[fault.where] += 1
        faulty = bool(fired_now) or (fault is not None and fault.kind != "skipped")
        there, size_there = _agreed(
            Path(path), number, elements, there, size_there, committed, faulty
        )
        if there == number:
            figures.committed += 1
        else:
            figures.failed += 1
        for nth, usages in (
            (place - WARM_UP, figures.first),
            (saves + WARM_UP + 1 - place, figures.last),
        ):
            # After a fault, a group may be gone that the next save makes anew.
            if 0 < nth <= window and there == number and not (fired_now or fault):
                usages.append(_usage())
    figures.seconds = time.monotonic() - began
    os.environ["DCP_DATASTATES_FAILPOINTS"] = ""
    failpoints.reload()
    assert _told(_begin(path, place + 1, MAX_ELEMENTS))
    assert_tidy(Path(path), WORLD)
    dist.barrier()
    return figures


def _save_with(fault: _Fault | None, path: str, number: int, elements: int) -> tuple[int, bool]:
    """The save's number, and whether this rank was told that it is committed."""
    kind = None if fault is None else fault.kind
    mine = fault is not None and fault.rank == dist.get_rank()
    if kind == "planner" and mine:
        return number, _told(_begin(path, number, elements, planner=FailingPlanner(fault.where)))
    if kind == "stalled":
        with _stalling(fault.where) if mine else contextlib.nullcontext():
            return number, _told(_begin(path, number, elements, commit_timeout=_PATIENCE_SECONDS))
    first = _begin(path, number, elements)
    if kind != "skipped":
        return number, _told(first)
    # Another one at its heels. If all ranks are through with the first, it is a save like others.
    second = report_of(
        _begin(path, -number, elements, when_behind="skip", max_in_flight=1), RESULT_SECONDS
    )
    committed = _told(first)
    if second.committed:
        return -number, True
    assert second.kind == "CheckpointSkipped", second
    return number, committed


@contextlib.contextmanager
def _stalling(where: str) -> Iterator[None]:
    """This rank stops there, for longer than the others wait."""
    with held(where) as point:
        going_on = threading.Timer(_STALLED_SECONDS, point.go_on.set)
        going_on.start()
        yield
        going_on.join()


def _begin(path: str, number: int, elements: int, **options: Any) -> Future[Any]:
    return save_over(part(number, elements), path, reads="immediate", **options)


def _told(future: Future[Any]) -> bool:
    """Whether this rank was told that it is committed."""
    try:
        future.result(RESULT_SECONDS)
    except BaseException as error:
        for cause in causes(error):
            if isinstance(cause, (TimeoutError, AssertionError, KeyboardInterrupt)):
                raise
        return False
    return True


def _agreed(
    path: Path,
    number: int,
    elements: int,
    there: int | None,
    size_there: int,
    committed: bool,
    faulty: bool,
) -> tuple[int | None, int]:
    """The checkpoint at the path now, and its size, as one rank has loaded it; collective."""
    everyone = gathered((committed, faulty))
    told = {one for one, _ in everyone}
    if not any(fault for _, fault in everyone):
        assert told == {True}, f"save {number} failed with no fault: {everyone}"
    found: list[Any] = [None]
    loader = number % WORLD
    if dist.get_rank() == loader:
        found[0] = _found(path, {number: elements, there: size_there})
    dist.broadcast_object_list(found, loader)
    assert found[0] in ({number} if True in told else {there, number}), (
        f"checkpoint {found[0]} is there after save {number}: {everyone}; before it was {there}"
    )
    return (number, elements) if found[0] == number else (there, size_there)


def _found(path: Path, sizes: Mapping[int | None, int]) -> int | None:
    """:func:`number_at` for checkpoints of different sizes."""
    return number_at(path, WORLD, sizes.__getitem__)


_libc = ctypes.CDLL(None)


def _usage() -> Usage:
    finish_callbacks(60)  # their thread starts with the first failure
    gc.collect()
    _libc.malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Usage(
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir("/proc/self/task")),
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
    )
