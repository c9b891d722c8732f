"""Cells of the kill matrix: a failpoint, and the kind of rank that dies there.

In a cell, checkpoint 1 is at the path and a job saves checkpoint 2 over it; one rank is killed at the
failpoint. Then a new process must find checkpoint 1 or 2, whole, and a new job must be able to save
checkpoint 3 there and leave nothing else behind.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from support.jobs.processes import Ended, run_ranks
from support.state.saving import COMMIT_GROUP, DEFERRED, Report

__all__ = ["CELLS", "NEVER", "POINTS", "Cell", "Kind", "kill", "passes"]

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


def _both(name: str, kinds: tuple[Kind, ...] = BOTH, **more: str) -> list[Point]:
    return [Point(f"{name}.{when}", kinds, **more) for when in ("before", "after")]


_NATIVE = (
    *("read", "flush.open", "flush.allocate", "flush.write", "flush.truncate", "flush.close"),
    *("sync.data", "sync.directory"),
)
_PUBLISH = ("lock", "create", "write", "sync_file", "rename", "sync_directory")

POINTS: tuple[Point, ...] = (
    *_both("stage"),
    *_both("plan"),
    # The rank that comes first makes the attempt's directory.
    *_both("plan.mkdir", COORDINATOR),
    *_both("plan.rename", COORDINATOR),
    *(point for name in _NATIVE for point in _both(name)),
    *_both("vote"),
    *(point for name in _PUBLISH for point in _both(f"publish.{name}", COORDINATOR)),
    *_both("outcome"),
    *_both("cleanup"),
    *_both("cleanup.unlink"),
    # The rank that comes last finds the directory of the old attempt empty.
    *_both("cleanup.rmdir", victim="cleanup.before=sleep:1"),
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


CELLS = tuple(Cell(point, kind) for point in POINTS for kind in point.kinds)
NEVER: Mapping[Kind, tuple[str, ...]] = {
    kind: tuple(point.name for point in POINTS if kind not in point.kinds) for kind in BOTH
}
"""By kind of rank, the failpoints that it never passes."""


@dataclass(frozen=True)
class Result:
    """What a cell came to."""

    found: str
    """"old" or "new"."""
    seconds: float | None
    """From the death to the last survivor's error; None if no survivor failed."""
    errors: list[str] = field(default_factory=list)


def _environment(fired: Path, failpoints: Iterable[str]) -> dict[str, str]:
    return {
        "DCP_DATASTATES_FAILPOINTS": ";".join(filter(None, failpoints)),
        "DCP_DATASTATES_FAILPOINTS_LOG": str(fired),
    }


def _fired(scratch: Path, rank: int) -> list[str]:
    log = scratch / f"fired{rank}"
    return log.read_text().split() if log.exists() else []


def kill(cell: Cell, committed: Path, scratch: Path) -> Result:
    """Run ``cell`` on a copy of ``committed``, where checkpoint 1 is. AssertionError if it does not hold."""
    path = scratch / "checkpoint"
    shutil.copytree(committed, path)
    ended = run_ranks(
        "support.state.saving:try_to_save",
        cell.world,
        scratch,
        environments=[
            _environment(
                scratch / f"fired{rank}",
                [cell.point.victim, f"{cell.point.name}=kill"]
                if rank == cell.victim
                else [cell.point.others],
            )
            for rank in range(cell.world)
        ],
        seconds=_ALL_RANKS_SECONDS,
        path=str(path),
        number=NEW,
        elements=DEFERRED,
        limit=LIMIT_SECONDS + 5,
    )
    victim = ended[cell.victim]
    assert cell.point.name in _fired(scratch, cell.victim), (
        f"{cell.point.name} was never passed on rank {cell.victim}, so this shows nothing: "
        f"{victim.value}\n{victim.error}\n{victim.log}"
    )
    assert victim.killed, f"rank {cell.victim} was not killed, exit code {victim.exit_code}"
    reports = [_report(one, cell) for one in ended if one.rank != cell.victim]
    number = _load(path, cell.world, scratch)
    assert number in (OLD, NEW), f"checkpoint {number} is there"
    for report in reports:
        assert number == NEW or not report.committed, (
            "a rank was told of a commit that is not there"
        )
    failed = [report for report in reports if not report.committed]
    seconds = max((report.at - victim.ended_at for report in failed), default=None)
    _save_next(path, cell.world, scratch)
    if COMMIT_GROUP:
        _assert_told_well(failed, cell, seconds)
    return Result(
        "old" if number == OLD else "new",
        None if seconds is None else max(0.0, seconds),
        [report.text for report in failed],
    )


def _report(survivor: Ended, cell: Cell) -> Report:
    """What a survivor saw; it must have ended of itself."""
    if COMMIT_GROUP:
        assert isinstance(survivor.result(), Report)
    assert isinstance(survivor.value, Report), (
        f"rank {survivor.rank} did not survive rank {cell.victim}: exit code {survivor.exit_code}\n"
        f"{survivor.error}\n{survivor.log}"
    )
    return survivor.value


def _assert_told_well(failed: list[Report], cell: Cell, seconds: float | None) -> None:
    for report in failed:
        assert report.ours, f"not an error of this package: {report.text}"
        assert f"rank {cell.victim}" in report.text, (
            f"rank {cell.victim} is not named: {report.text}"
        )
    assert seconds is None or seconds < LIMIT_SECONDS, f"the survivors took {seconds:.0f} s"


def _load(path: Path, world: int, scratch: Path) -> int | None:
    (loader,) = run_ranks(
        "support.state.saving:number_found",
        1,
        scratch,
        path=str(path),
        world=world,
        elements=DEFERRED,
    )
    return loader.result()


def _save_next(path: Path, world: int, scratch: Path) -> None:
    """A new job saves and loads checkpoint 3; only that is left."""
    for one in run_ranks(
        "support.state.saving:commit_checkpoint",
        world,
        scratch,
        path=str(path),
        number=NEXT,
        elements=DEFERRED,
    ):
        one.result()
    left = sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))
    attempt, *more = sorted({name.split("/")[0] for name in left} - {".metadata", "README"})
    assert not more, f"left behind: {left}"
    files = [f"{attempt}/r{rank:05}-0.safetensors" for rank in range(world)]
    assert left == sorted([".metadata", "README", attempt, *files]), f"left behind: {left}"


def passes(kind: Kind, names: Iterable[str], committed: Path, scratch: Path) -> list[str]:
    """Which of the failpoints a rank of ``kind`` passes while it saves over ``committed``, alive."""
    world = 2
    path = scratch / "checkpoint"
    shutil.copytree(committed, path)
    armed = 0 if kind == "coordinator" else 1
    harmless = [f"{name}=sleep:0" for name in names]
    for one in run_ranks(
        "support.state.saving:commit_checkpoint",
        world,
        scratch,
        environments=[
            _environment(scratch / f"fired{rank}", harmless if rank == armed else [])
            for rank in range(world)
        ],
        path=str(path),
        number=NEW,
        elements=DEFERRED,
    ):
        one.result()
    return sorted(set(_fired(scratch, armed)))
