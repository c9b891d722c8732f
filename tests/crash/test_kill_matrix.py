"""A rank is killed at every named place of a save, to a directory or to an object store: the old checkpoint or the new
one is there, whole, and life goes on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from support.crashes.cells import (
    BOTH,
    OLD,
    POINTS,
    POINTS_OF_STORES,
    Cell,
    Directory,
    Place,
    Prefix,
    kill,
    never,
    passes,
)
from support.jobs.processes import run_ranks
from support.state.saving import DEFERRED
from support.stores.server import BUCKET, strict_endpoint, variables
from support.tiers import sampled

ALL_POINTS = {"directory": POINTS, "store": POINTS_OF_STORES}
CELLS = [
    pytest.param(Cell(point, kind), place, id=f"{point.name}-{kind}-{place}")
    for place, points in ALL_POINTS.items()
    for point in points
    for kind in point.kinds
]
SAMPLE = (
    *("stage.before-other-directory", "plan.mkdir.after-coordinator-directory"),
    *("sync.data.before-other-directory", "vote.before-other-directory"),
    *("vote.after-coordinator-directory", "publish.link.before-coordinator-directory"),
    *("publish.link.after-coordinator-directory", "outcome.before-other-directory"),
    *("cleanup.unlink.after-coordinator-directory", "upload.before-other-store"),
    *("publish.register.after-coordinator-store", "publish.decide.after-coordinator-store"),
)
"""In each phase of a save one cell or two: both kinds of rank, and both sides of what matters most."""

NEVER_IN = {
    "directory": (),
    "store": ("publish.link.before", "flush.write.before", "sync.data.before", "plan.mkdir.before"),
}
SEEN_IN = {"directory": ["plan.before", "vote.before"], "store": ["upload.before"]}


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], str]:
    """Where checkpoint 1 is, which so many ranks have saved: once, by processes of their own; cells work on copies."""
    scratch = tmp_path_factory.mktemp("committed")

    @functools.cache
    def at(place: str, world: int) -> str:
        path, environment = str(scratch / f"world{world}"), {}
        if place == "store":
            path = f"s3://{BUCKET}/{scratch.parent.name}/{scratch.name}/world{world}/checkpoint"
            environment = variables(strict_endpoint())
        for rank in run_ranks(
            "support.state.saving:commit_checkpoint",
            world,
            scratch,
            environments=[environment] * world,
            path=path,
            number=OLD,
            elements=DEFERRED,
        ):
            rank.result()
        return path

    return at


@pytest.fixture
def copy_of(committed, tmp_path, monkeypatch) -> Callable[[str, int, Path], Place]:
    """A copy for one job: of a directory in ``scratch``, of a prefix below an empty one of the same name."""

    def copied(place: str, world: int, scratch: Path) -> Place:
        if place == "directory":
            return Directory(Path(committed(place, world)), scratch)
        # This process opens it anew.
        monkeypatch.setattr("dcp_datastates.storage.object_path._opened", {})
        for name, value in variables(strict_endpoint()).items():
            monkeypatch.setenv(name, value)
        root = f"{tmp_path.parent.name}/{scratch.relative_to(tmp_path.parent)}"
        return Prefix(committed(place, world), f"s3://{BUCKET}/{root}")

    return copied


@pytest.mark.parametrize(("cell", "place"), sampled(CELLS, SAMPLE))
def test_a_rank_is_killed(cell: Cell, place: str, copy_of, tmp_path):
    kill(cell, copy_of(place, cell.world, tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("kind", "place"),
    sampled(
        [(kind, place) for place in ALL_POINTS for kind in sorted(BOTH)],
        keep=lambda case: case[0] == "other",
    ),
)
def test_what_is_declared_never_to_be_passed_is_not(kind, place, copy_of, tmp_path):
    names = [*never(ALL_POINTS[place])[kind], *NEVER_IN[place]]
    assert passes(kind, names, copy_of(place, 2, tmp_path), tmp_path) == []
    # And the way to see it works:
    again = tmp_path / "seen"
    assert passes(kind, SEEN_IN[place], copy_of(place, 2, again), again) == SEEN_IN[place]
