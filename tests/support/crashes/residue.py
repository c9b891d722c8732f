"""What a process holds, and whether it is back to what it held before: nothing leaks."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dcp_datastates.commit import group as groups
from dcp_datastates.io import engine
from dcp_datastates.process.futures import finish_callbacks
from dcp_datastates.ranks import gloo_group
from dcp_datastates.ranks.failure_detector import FailureDetector

_SECONDS = 60.0
"""How long what is being let go may take."""


_BEATS_SECONDS = 20.0

_RESTORING = ("ds-restore", "ds-place")


@dataclass(frozen=True)
class Residue:
    """Threads of Python's by name, all threads of the process, what the descriptors are open on, cache in use."""

    threads: Counter[str]
    tasks: Counter[str]
    descriptors: Counter[str]
    cache_segments: int

    @staticmethod
    def now() -> Residue:
        finish_callbacks(_SECONDS)  # their thread starts with the first failure, which it notes
        gc.collect()
        _await_beats()
        _await_starts()
        stats = engine.stats()
        return Residue(
            # A thread that logs while it ends leaves a dummy until its number is used again; its task is gone.
            Counter(
                _plain(thread.name)
                for thread in threading.enumerate()
                if not isinstance(thread, threading._DummyThread)
            ),
            _tasks(),
            Counter(_descriptors()),
            0 if stats is None else stats.total_segments - stats.free_segments,
        )

    def beyond(self, before: Residue) -> dict[str, object]:
        """What there is more of now than ``before``; any segment of the cache that is not free.

        But for what gloo keeps by a defect of its own: see :data:`dcp_datastates.ranks.gloo_group.abandoned`.
        """
        stuck = len(gloo_group.abandoned)
        more = {
            "threads": self.threads - before.threads,
            "native threads": self._more_tasks(before, 3 * stuck),
            "descriptors": self.descriptors - before.descriptors - _of_gloo(stuck),
            "cache segments": self.cache_segments,
        }
        return {what: much for what, much in more.items() if much}

    def _more_tasks(self, before: Residue, allowed: int) -> Counter[str]:
        """By name; none, if there are not more in all: a thread may take another's place."""
        many = self.tasks.total() > before.tasks.total() + allowed
        return self.tasks - before.tasks if many else Counter()


def _await_beats() -> None:
    """Ranks hear each other some time after their first save, and the thread that asks the store starts with that."""
    deadline = time.monotonic() + _BEATS_SECONDS
    for detector in [group.detector for group in list(groups._groups.values())]:
        while not _hears_all(detector) and time.monotonic() < deadline:
            time.sleep(0.02)


def _await_starts() -> None:
    """Python lists a thread before the system has it, and for a moment after: both counts are to be of the same."""
    deadline = time.monotonic() + _BEATS_SECONDS
    while time.monotonic() < deadline:
        tasks = {int(number) for number in os.listdir("/proc/self/task")}
        known = [
            each for each in threading.enumerate() if not isinstance(each, threading._DummyThread)
        ]
        if all(each.native_id in tasks for each in known):
            return
        time.sleep(0.001)


def _hears_all(detector: FailureDetector | None) -> bool:
    """Whether it has heard each rank that it watches; it watches none before it has started."""
    return (
        detector is None
        or not detector.is_started
        or all(each.value for each in list(detector._watched.values()))
    )


def _tasks() -> Counter[str]:
    """Threads of the process by name, without those that the engine starts with its first restore and keeps."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append((task / "comm").read_text().strip())
    return Counter(name for name in names if not name.startswith(_RESTORING))


def _of_gloo(groups: int) -> Counter[str]:
    """The descriptors of so many gloo groups whose connections are closed."""
    return Counter({"pipe:[#]": 2 * groups, "anon_inode:[eventpoll]": groups, "socket:[#]": groups})


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]?\d+", "", name)


def _descriptors() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists the directory
            yield re.sub(r"\d+", "#", os.readlink(f"/proc/self/fd/{number}"))


def assert_nothing_left(before: Residue, after: str = "") -> None:
    """This process holds nothing more than ``before``, now or soon."""
    deadline = time.monotonic() + _SECONDS
    while left := Residue.now().beyond(before):
        assert time.monotonic() < deadline, f"left {after or 'behind'}: {left}"
        time.sleep(0.02)


def entries(path: Path) -> list[str]:
    """Everything below ``path``, relative to it."""
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))
