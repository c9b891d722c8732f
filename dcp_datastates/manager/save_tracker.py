"""The saves in flight of one loop, or of one framework: what comes of them, and the deletions that wait for commits."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

from dcp_datastates.checkpoints.retention import Deletions
from dcp_datastates.config import check_count
from dcp_datastates.dcp.async_save import SaveHandle
from dcp_datastates.errors import CheckpointSkipped, ConfigurationError, ReplicasDifferError
from dcp_datastates.process.forks import enter
from dcp_datastates.process.futures import when_done
from dcp_datastates.storage.object_path import Location

MaxFailures = int | Literal["auto"] | None

_MOST_FAILURES: Final = 5
"""How many failures in a row end a loop, if the program does not say: a job whose disk is full must end."""


@dataclass(eq=False)
class _Save:
    path: Location
    handle: SaveHandle | None = None
    """None: it could not begin."""


@dataclass(eq=False)
class _Waiting:
    """Work that waits for the commit of a save."""

    work: Callable[[], object]
    save: _Save
    deletes: Location | None

    def waits_for_failed(self, path: Location | None) -> bool:
        """Whether it waits for a save to ``path`` that has failed."""
        return self.save.path == path and is_committed(self.save.handle) is False


def most_failures(given: MaxFailures, max_in_flight: int) -> int | None:
    """The limit of failures in a row. With more saves in flight than the limit, every save would wait for them."""
    if given == "auto":
        return max(_MOST_FAILURES, max_in_flight + 1)
    return (
        given if given is None else check_count("max_failures", given, more="; None for no limit")
    )


def is_committed(handle: SaveHandle | None) -> bool | None:
    """Whether a save is committed; None if its outcome is not known. One that could not begin (None) is not."""
    if handle is None:
        return False
    return handle.committed.exception() is None if handle.committed.done() else None


class SaveTracker:
    """The saves in flight, what came of those before them, and the work that waits for their commits.

    Args:
        max_failures: so many failures in a row end the loop: :meth:`check` and :meth:`finish` raise the last. None: no
            number does. A failure by which no save can succeed (:class:`ConfigurationError`: ranks with different
            disks, say) always does.

    Raises :class:`ConfigurationError` for an argument that cannot work.

    Threads: one thread calls the methods; any thread may call :meth:`failed`. Work runs in the thread of
    :attr:`deletions`, in order.
    """

    def __init__(self, max_failures: MaxFailures = None, *, max_in_flight: int = 1) -> None:
        self.most = most_failures(max_failures, max_in_flight)
        self.deletions = Deletions()
        self.failures = 0
        """How many saves have failed, without those that ``when_behind`` left out."""
        self.commits = 0
        self.newest_commit: Location | None = None
        """The path of the newest save that is committed."""
        self._in_a_row = 0
        self._last: BaseException | None = None  # the last failure, if there is a limit
        self._hopeless: BaseException | None = None  # why no save can succeed
        self._newest: _Save | None = None
        self._open: dict[_Save, SaveHandle] = {}  # whose outcome the loop does not know, in order
        self._lock = threading.RLock()  # guards what follows, and the failures
        self._waiting: list[_Waiting] = []

    def in_flight(self, path: Location | None = None) -> list[SaveHandle]:
        """The saves whose outcome the loop does not know, the oldest first; to ``path``, if there is one."""
        return [handle for save, handle in list(self._open.items()) if path in (None, save.path)]

    def standing(self) -> str:
        """The newest commit and the saves in flight, in words. Asks nothing."""
        saves, newest = self.in_flight(), self.newest_commit
        newest = next((each.path for each in saves[::-1] if each.doing == "committed"), newest)
        flying = [each for each in saves if not each.doing.startswith(("committed", "failed"))]
        return f"newest commit: {newest and newest.name}, in flight: {flying}"

    def begin(self, path: Location, call: Callable[[], SaveHandle]) -> SaveHandle:
        """Make ``call``, which begins a save to ``path``: a deletion of ``path`` that waits is cancelled. Raises what
        ``call`` raises.
        """
        enter("a save")
        self._newest = save = _Save(path)
        with self._lock:
            self._waiting = [each for each in self._waiting if each.deletes != path]
        save.handle = self._open[save] = handle = call()
        when_done(handle.committed, lambda _: self._request())
        return handle

    def failed(self, path: Location, error: BaseException) -> None:
        """A save has failed, or could not begin."""
        with self._lock:
            self.failures += 1
            self._in_a_row += 1
            self._last = None if self.most is None else error
            if isinstance(error, ConfigurationError):
                self._hopeless = error

    def take(self) -> None:
        """Learn what came of the saves that have ended."""
        for save, handle in list(self._open.items()):
            # A signal handler that saves may come in between.
            if not handle.committed.done() or self._open.pop(save, None) is None:
                continue
            self._request()  # the callback may come later
            error = handle.committed.exception()
            if error is None:
                if not isinstance(self._last, ReplicasDifferError):  # another part is equal
                    self._in_a_row, self._last = 0, None
                self.commits, self.newest_commit = self.commits + 1, save.path
            elif not isinstance(error, CheckpointSkipped):
                self.failed(save.path, error)

    def drain(self, until: float | None = None) -> None:
        """Wait until the outcomes of all saves are known. Starts their reads immediately. Those that are not known at
        the time ``until``, by ``time.monotonic()``, are given up.
        """
        for handle in self.in_flight():
            left = None if until is None else max(0.0, until - time.monotonic())
            if not handle.wait(left):
                handle.give_up("the deadline of the job's end has passed")

    def check(self) -> None:
        """:meth:`take`, and raise the last failure if there are too many in a row. Waits for the saves in flight if
        they decide that: all ranks see the same.
        """
        self.take()
        if self.most is not None and self._in_a_row + len(self._open) >= self.most:
            self.finish()
        self._raise_at_limit()

    def finish(self, until: float | None = None) -> None:
        """:meth:`drain`, and raise the last failure if there are too many in a row; once."""
        self.drain(until)
        self.take()
        self._raise_at_limit()

    def _raise_at_limit(self) -> None:
        failure = self._hopeless
        if failure is None and self.most is not None and self._in_a_row >= self.most:
            failure = self._last
        if failure is not None:
            self._in_a_row, self._last, self._hopeless = 0, None, None
            raise failure

    def summary(self, root: Location) -> tuple[int, str] | None:
        """What came of the saves below ``root``, as a line of the log and its level; None if there were none."""
        if not self.commits + self.failures:
            return None
        newest = self.newest_commit
        there = f"the newest is {str(newest)!r}" if newest else f"none is in {str(root)!r}"
        level = logging.WARNING if self.failures else logging.INFO
        return level, f"{self.commits} saves committed, {self.failures} failed; {there}"

    def wait(self) -> None:
        """:meth:`finish`, and wait until the work that is due is done."""
        try:
            self.finish()
        finally:
            self.deletions.wait()

    def when_committed(self, work: Callable[[], object], deletes: Location | None = None) -> None:
        """Have ``work`` done once the newest save is committed; immediately if there is none. If that save fails,
        ``work`` is dropped.

        If ``deletes`` names the path that ``work`` deletes, since the newest save replaces what is there: ``work``
        stays if that save fails, and waits for the one that replaces it; and a save to that path cancels it. Where the
        save to that path itself has failed, only an empty directory is left, and is removed.
        """
        save = self._newest
        if save is None:
            self.deletions.request(work)
            return
        with self._lock:
            self._waiting.append(_Waiting(work, save, deletes))
            self._request()

    def _request(self) -> None:
        """Request what is due. Also in the commit thread, which must not wait for storage."""
        with self._lock:  # wait() comes after what is requested here
            waiting = self._waiting
            deletions = [each for each in waiting if each.deletes is not None]
            for each in deletions:
                # If the save to that path has failed, this save replaces what the failed one was to replace.
                put_off = [other for other in deletions if other.waits_for_failed(each.deletes)]
                for other in put_off:
                    other.save = each.save
                if put_off:
                    waiting.remove(each)
                    self.deletions.request(partial(_remove_empty, each.deletes))
            self._waiting = []
            for each in waiting:
                committed = is_committed(each.save.handle)
                if committed:
                    self.deletions.request(each.work)
                elif committed is None or each.deletes is not None:
                    self._waiting.append(each)


def _remove_empty(path: Location | None) -> None:
    if isinstance(path, Path):
        with contextlib.suppress(OSError):
            path.rmdir()
