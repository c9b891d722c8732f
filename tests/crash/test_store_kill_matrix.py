"""A rank is killed at every named place of a save to an object store: the old checkpoint or the new one is there,
whole, and life goes on.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from support.crashes.cells import COORDINATOR, OLD, Cell, Point, both, kill, never, passes
from support.jobs.processes import run_ranks
from support.state.saving import DEFERRED
from support.stores.server import BUCKET, Bucket, strict_endpoint, variables
from support.tiers import sampled

from dcp_datastates import delete, latest, retain

POINTS: tuple[Point, ...] = (
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
CELLS = tuple(Cell(point, kind) for point in POINTS for kind in point.kinds)
NEVER = never(POINTS)

_MOST_OF_A_WITHDRAWAL = 64
"""Bytes. Withdrawn decisions stay, for good (docs/commit.md)."""


SAMPLE = (
    "upload.before-other",
    *("publish.register.after-coordinator", "publish.decide.after-coordinator"),
)


class Prefix:
    """A copy of the checkpoint at the URL ``committed`` below the URL ``root``, with its entry in the index."""

    def __init__(self, committed: str, root: str) -> None:
        self.path = f"{root}/checkpoint"
        self.environment: Mapping[str, str] = variables(strict_endpoint())
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


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The URLs of checkpoint 1 by world size, saved once by processes of its own; cells work on copies."""
    scratch = tmp_path_factory.mktemp("committed")
    found = {}
    for world in (2, 3):
        found[world] = f"s3://{BUCKET}/{scratch.parent.name}/{scratch.name}/world{world}/checkpoint"
        for rank in run_ranks(
            "support.state.saving:commit_checkpoint",
            world,
            scratch,
            environments=[variables(strict_endpoint())] * world,
            path=found[world],
            number=OLD,
            elements=DEFERRED,
        ):
            rank.result()
    return found


@pytest.fixture
def root(tmp_path, monkeypatch) -> str:
    """The URL of an empty prefix, whose store this process opens anew."""
    monkeypatch.setattr("dcp_datastates.storage.stores._opened", {})
    for name, value in variables(strict_endpoint()).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{tmp_path.parent.name}/{tmp_path.name}"


@pytest.mark.parametrize("cell", sampled(CELLS, SAMPLE), ids=str)
def test_a_rank_is_killed(cell: Cell, committed, root, tmp_path):
    kill(cell, Prefix(committed[cell.world], root), tmp_path)


@pytest.mark.parametrize("kind", sampled(sorted(NEVER), ["other"]))
def test_what_is_declared_never_to_be_passed_is_not(kind, committed, root, tmp_path):
    others = [
        "publish.link.before",
        "flush.write.before",
        "sync.data.before",
        "plan.mkdir.before",
    ]
    names = [*NEVER[kind], *others]
    assert passes(kind, names, Prefix(committed[2], root), tmp_path) == []
    seen = passes(kind, ["upload.before"], Prefix(committed[2], f"{root}/seen"), tmp_path / "s")
    assert seen == ["upload.before"]
