"""A store of objects in memory, and streamed saves and restores through it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dcp_datastates import _native

Data = np.ndarray


class Objects:
    """``put_stream`` and ``read_range`` of a store. ``meanwhile`` is called before each piece and each range, with the
    name and the number of bytes before it: it may wait, or raise.
    """

    def __init__(self, meanwhile: Callable[[str, int], None] = lambda name, at: None) -> None:
        self.stored: dict[str, bytes] = {}
        self.ranges: list[tuple[str, int, int]] = []
        self.meanwhile = meanwhile
        self._lock = threading.Lock()

    def put_stream(self, name: str, pieces: Iterator[_native.Segment]) -> None:
        data = bytearray()
        for piece in pieces:
            self.meanwhile(name, len(data))
            data += memoryview(piece)
        with self._lock:
            self.stored[name] = bytes(data)

    def read_range(self, name: str, begin: int, end: int) -> bytes | memoryview:
        self.meanwhile(name, begin)
        with self._lock:
            self.ranges.append((name, begin, end))
        return memoryview(self.stored[name])[begin:end]


def sources(*sizes: int) -> list[Data]:
    random = np.random.default_rng(sizes)
    return [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]


def _content(data: Data) -> _native.Transfer:
    content = _native.Transfer()
    content.add_buffer(0, data)
    return content


def save(
    engine: _native.Engine, data: Sequence[Data], order: int = 0
) -> tuple[_native.SaveJob, list[str]]:
    """The job, and the names of its files."""
    names = [f"s3://bucket/{index}" for index in range(len(data))]
    files = [
        _native.SaveFile(name, each.nbytes, _content(each))
        for name, each in zip(names, data, strict=True)
    ]
    return engine.save_streamed(files, order, _native.Window(0), data), names


def restore(
    engine: _native.Engine, objects: Objects, names: Sequence[str], data: Sequence[Data]
) -> _native.RestoreJob:
    """Into ``data``, which has the sizes of what was saved."""
    plan = _native.RestorePlan()
    for name, each in zip(names, data, strict=True):
        plan.add_file(name, len(objects.stored[name]), each.nbytes, _content(each))
    return engine.restore_streamed(plan, data)
