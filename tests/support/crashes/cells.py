"""Cells of the kill matrix: a failpoint, and the kind of rank that dies there.

In a cell, checkpoint 1 is at the path and a job saves checkpoint 2 over it; one rank is killed at the
failpoint. Then a new process must find checkpoint 1 or 2, whole, and a new job must be able to save
checkpoint 3 there and leave nothing else behind.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from support.crashes.failing import fired, variables
from support.crashes.faults import assert_tidy
from support.jobs.processes import run_ranks
from support.state.saving import DEFERRED, Report

Kind = Literal["coordinator", "other"]
BOTH: tuple[Kind, ...] = ("coordinator", "other")
COORDINATOR: tuple[Kind, ...] = ("coordinator",)

OLD, NEW, NEXT = 1, 2, 3

LIMIT_SECONDS = 30.0
"""How long after the death of a rank the others may take to fail."""

_ALL_RANKS_SECONDS = LIMIT_SECONDS + 20


@dataclass(frozen=True)
class Point:
    """A failpoint, and how to bring about that a rank of some kind passes it."""

    name: str
    kinds: tuple[Kind, ...] = BOTH
    victim: str = ""
    """More failpoints for the one that is to die, so that it comes last where the last one does it."""
    others: str = ""
    """The same for the rest, so that the victim comes first."""


def both(name: str, kinds: tuple[Kind, ...] = BOTH, **more: str) -> list[Point]:
    return [Point(f"{name}.{when}", kinds, **more) for when in ("before", "after")]


_NATIVE = (
    *("read", "flush.open", "flush.allocate", "flush.write", "flush.truncate", "flush.close"),
    *("sync.data", "sync.directory"),
)
_PUBLISH = ("decide", "create", "write", "sync_file", "link", "sync_directory")
_CLEANUP = ("link", "create", "write", "sync_file", "rename", "sync_directory", "unlink", "rmdir")

POINTS: tuple[Point, ...] = (
    *both("stage"),
    *both("plan"),
    *both("plan.mkdir", COORDINATOR),
    *(point for name in _NATIVE for point in both(name)),
    *both("vote"),
    *(point for name in _PUBLISH for point in both(f"publish.{name}", COORDINATOR)),
    *both("outcome"),
    *both("cleanup"),
    *(point for name in _CLEANUP for point in both(f"cleanup.{name}", COORDINATOR)),
)


@dataclass(frozen=True)
class Cell:
    """``kind`` of rank dies at ``point``."""

    point: Point
    kind: Kind

    @property
    def world(self) -> int:
        """Three ranks where they have to do with each other: two are left, and must agree."""
        return 3 if self.point.name.split(".")[0] in ("vote", "publish", "outcome") else 2

    @property
    def victim(self) -> int:
        return 0 if self.kind == "coordinator" else self.world - 1

    def __str__(self) -> str:
        return f"{self.point.name}-{self.kind}"


def never(points: Iterable[Point]) -> Mapping[Kind, tuple[str, ...]]:
    """By kind of rank, the failpoints that it never passes."""
    there = list(points)
    return {kind: tuple(point.name for point in there if kind not in point.kinds) for kind in BOTH}


CELLS = tuple(Cell(point, kind) for point in POINTS for kind in point.kinds)
NEVER = never(POINTS)


class Place(Protocol):
    """Where checkpoint 1 is, and a cell saves."""

    path: str
    environment: Mapping[str, str]
    """What a process needs to save there."""

    def check_left(self, world: int) -> None:
        """AssertionError unless only checkpoint 3 is left, which ``world`` ranks have saved."""


class Directory:
    """A copy, in the directory ``scratch``, of ``committed``, where checkpoint 1 is."""

    environment: Mapping[str, str] = {}

    def __init__(self, committed: Path, scratch: Path) -> None:
        self.path = str(scratch / "checkpoint")
        shutil.copytree(committed, self.path)

    def check_left(self, world: int) -> None:
        assert_tidy(Path(self.path), world)


def _environment(place: Place, log: Path, failpoints: Iterable[str]) -> dict[str, str]:
    return {**place.environment, **variables(";".join(filter(None, failpoints)), log)}


def kill(cell: Cell, place: Place, scratch: Path) -> None:
    """Run ``cell`` at ``place``. AssertionError if it does not hold."""
    ended = run_ranks(
        "support.state.saving:try_to_save",
        cell.world,
        scratch,
        environments=[
            _environment(
                place,
                scratch / f"fired{rank}",
                [cell.point.victim, f"{cell.point.name}=kill"]
                if rank == cell.victim
                else [cell.point.others],
            )
            for rank in range(cell.world)
        ],
        seconds=_ALL_RANKS_SECONDS,
        path=place.path,
        number=NEW,
        elements=DEFERRED,
        limit=LIMIT_SECONDS + 5,
    )
    victim = ended[cell.victim]
    assert cell.point.name in fired(scratch / f"fired{cell.victim}"), (
        f"{cell.point.name} was never passed on rank {cell.victim}, so this shows nothing: "
        f"{victim.value}\n{victim.error}\n{victim.log}"
    )
    assert victim.killed, f"rank {cell.victim} was not killed, exit code {victim.exit_code}"
    reports: list[Report] = [one.result() for one in ended if one.rank != cell.victim]
    number = _load(place, cell.world, scratch)
    assert number in (OLD, NEW), f"checkpoint {number} is there"
    for report in reports:
        assert number == NEW or not report.committed, (
            "a rank was told of a commit that is not there"
        )
    failed = [report for report in reports if not report.committed]
    seconds = max((report.at - victim.ended_at for report in failed), default=None)
    _save_next(place, cell.world, scratch)
    _assert_told_well(failed, cell, seconds)


def _assert_told_well(failed: list[Report], cell: Cell, seconds: float | None) -> None:
    for report in failed:
        assert report.ours, f"not an error of this package: {report.text}"
        assert f"rank {cell.victim}" in report.text, (
            f"rank {cell.victim} is not named: {report.text}"
        )
    assert seconds is None or seconds < LIMIT_SECONDS, f"the survivors took {seconds:.0f} s"


def _load(place: Place, world: int, scratch: Path) -> int | None:
    (loader,) = run_ranks(
        "support.state.saving:number_found",
        1,
        scratch,
        environments=[place.environment],
        path=place.path,
        world=world,
        elements=DEFERRED,
    )
    return loader.result()


def _save_next(place: Place, world: int, scratch: Path) -> None:
    """A new job saves and loads checkpoint 3; only that is left."""
    for one in run_ranks(
        "support.state.saving:commit_checkpoint",
        world,
        scratch,
        environments=[place.environment] * world,
        path=place.path,
        number=NEXT,
        elements=DEFERRED,
    ):
        one.result()
    place.check_left(world)


def passes(kind: Kind, names: Iterable[str], place: Place, scratch: Path) -> list[str]:
    """Which of the failpoints a rank of ``kind`` passes while it saves to ``place``, alive."""
    world = 2
    armed = 0 if kind == "coordinator" else 1
    harmless = [f"{name}=sleep:0" for name in names]
    for one in run_ranks(
        "support.state.saving:commit_checkpoint",
        world,
        scratch,
        environments=[
            _environment(place, scratch / f"fired{rank}", harmless if rank == armed else [])
            for rank in range(world)
        ],
        path=place.path,
        number=NEW,
        elements=DEFERRED,
    ):
        one.result()
    return sorted(set(fired(scratch / f"fired{armed}")))
