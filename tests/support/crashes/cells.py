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
from typing import Literal

from dcp_datastates import delete, latest, retain
from dcp_datastates.storage.job_notes import FAILURE_NAME
from support.crashes.failing import fired, variables
from support.crashes.faults import assert_tidy
from support.jobs.processes import run_ranks
from support.state.saving import DEFERRED, Report
from support.stores.server import BUCKET, Bucket, strict_endpoint
from support.stores.server import variables as variables_of_server

Kind = Literal["coordinator", "other"]
BOTH: tuple[Kind, ...] = ("coordinator", "other")
COORDINATOR: tuple[Kind, ...] = ("coordinator",)

OLD, NEW, NEXT = 1, 2, 3

LIMIT_SECONDS = 30.0
"""How long after the death of a rank the others may take to fail."""

_ALL_RANKS_SECONDS = LIMIT_SECONDS + 90


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
_CLEANUP = ("link", "create", "write", "sync_file", "rename", "sync_directory", "unlink")

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

POINTS_OF_STORES: tuple[Point, ...] = (
    *both("stage"),
    *both("plan"),
    *both("read"),
    *both("upload"),
    *both("vote"),
    *both("publish.register", COORDINATOR),
    *both("publish.decide", COORDINATOR),
    *both("outcome"),
    *both("cleanup"),
)

_MOST_OF_A_WITHDRAWAL = 64
"""Bytes. Withdrawn decisions stay in a store, for good (docs/design/commit.md)."""


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


NEVER = never(POINTS)


class Directory:
    """A copy, in the directory ``scratch``, of ``committed``, where checkpoint 1 is."""

    environment: Mapping[str, str] = {}
    """What a process needs to save there."""

    def __init__(self, committed: Path, scratch: Path) -> None:
        self.path = str(scratch / "checkpoint")
        shutil.copytree(committed, self.path)

    def check_left(self, world: int) -> None:
        """AssertionError unless only checkpoint 3 is left, which ``world`` ranks have saved."""
        assert_tidy(Path(self.path), world)


class Prefix:
    """A copy of the checkpoint at the URL ``committed`` below the URL ``root``, with its entry in the index."""

    def __init__(self, committed: str, root: str) -> None:
        self.path = f"{root}/checkpoint"
        self.environment: Mapping[str, str] = variables_of_server(strict_endpoint())
        self._root = root
        self._bucket = Bucket(strict_endpoint())
        before, now = self._key(committed.rpartition("/")[0]), self._key(root)
        for key in self._bucket.keys(f"{before}/"):
            self._bucket.put(now + key.removeprefix(before), self._bucket.get(key))

    def check_left(self, world: int) -> None:
        attempts = {key.split("/")[0] for key in self._left(self.path) if "/" in key}
        data = [key for key in self._left(self.path) if key.endswith(".safetensors")]
        assert len(data) == world, f"left behind: {self._left(self._root)}"
        newest = {key.split("/")[0] for key in data}
        entries = self._left(f"{self._root}/.attempts")
        assert len(newest) == len(entries) == 1, f"left behind: {self._left(self._root)}"
        for attempt in attempts - newest:
            self._assert_withdrawn(self.path, f"{attempt}/decision")
        assert str(latest(self._root)) == self.path
        retain(self._root, keep=1)
        assert len(self._left(f"{self._root}/.attempts")) == 1
        delete(self.path)
        for key in self._left(self._root):
            if key != FAILURE_NAME:  # of the save that has failed
                self._assert_withdrawn(self._root, key)

    def _assert_withdrawn(self, url: str, key: str) -> None:
        data = self._bucket.get(f"{self._key(url)}/{key}")
        assert data.startswith(b"withdrawn"), f"left behind: {key}"
        assert len(data) <= _MOST_OF_A_WITHDRAWAL

    def _left(self, url: str) -> list[str]:
        prefix = f"{self._key(url)}/"
        return [key.removeprefix(prefix) for key in self._bucket.keys(prefix)]

    @staticmethod
    def _key(url: str) -> str:
        return url.removeprefix(f"s3://{BUCKET}/")


Place = Directory | Prefix
"""Where checkpoint 1 is, and a cell saves."""


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
        "support.state.saving:number_at",
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
