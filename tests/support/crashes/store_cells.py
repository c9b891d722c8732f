"""Cells of the kill matrix in an object store: a server of its own, and the failpoints that a save to it passes."""

from __future__ import annotations

from collections.abc import Mapping

from dcp_datastates import delete, latest, retain
from support.crashes.cells import COORDINATOR, Cell, Point, both, never
from support.stores.server import BUCKET, Bucket, endpoint, use, variables

__all__ = ["STORE_CELLS", "STORE_NEVER", "STORE_POINTS", "Prefix"]

STORE_POINTS: tuple[Point, ...] = (
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
STORE_CELLS = tuple(Cell(point, kind) for point in STORE_POINTS for kind in point.kinds)
STORE_NEVER = never(STORE_POINTS)

_MOST_OF_A_WITHDRAWAL = 64
"""Bytes. Withdrawn decisions stay, for good (docs/commit.md)."""


class Prefix:
    """A copy of the checkpoint at the URL ``committed`` below the URL ``root``, with its entry in the index."""

    def __init__(self, committed: str, root: str) -> None:
        self.path = f"{root}/checkpoint"
        self.environment: Mapping[str, str] = variables(endpoint())
        self._root = root
        self._bucket = Bucket(endpoint())
        before, now = self._key(committed.rpartition("/")[0]), self._key(root)
        for key in self._bucket.keys(f"{before}/"):
            self._bucket.put(now + key.removeprefix(before), self._bucket.get(key))

    def check_left(self, world: int) -> None:
        use(endpoint())
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
