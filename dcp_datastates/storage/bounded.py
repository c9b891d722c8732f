"""File operations that may never return: the server behind a hard mount is away, say.

A thread that must not wait without a bound hands its file operations, as one piece of work, to a storage thread
(``dcp_datastates-storage``), and waits. If there is no progress for too long, the work is abandoned: the caller gets a
:class:`HungError`, and goes on. The storage thread stays in its operation. When that returns, the work's next operation
(``operations.py``) unwinds in place of being made. So abandoned work carries out, late, at most the one operation in
which it hung. The commit protocol allows for that: a system call of a process that died may be carried out late, too.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from dcp_datastates.errors import StorageError
from dcp_datastates.process.futures import Worker

T = TypeVar("T")

_LOOK_SECONDS: Final = 1.0
"""Longest time between two looks for progress."""


class HungError(StorageError):
    """A file operation did not return in time. It may still be carried out."""


class _Abandoned(BaseException):
    """Unwinds abandoned work. No error: no handler may go on."""


@dataclass
class _Work:
    what: str
    moved_at: float = field(default_factory=time.monotonic)
    ended: bool = False
    abandoned: bool = False
    """Whether this work must not go on when its present operation returns."""
    trouble: str | None = None
    """What storage answers in place of carrying out the present operation."""

    @property
    def still(self) -> float:
        """Seconds without progress."""
        return time.monotonic() - self.moved_at


class _Current(threading.local):
    work: _Work | None = None


_current = _Current()
_lock = threading.RLock()  # guards what follows, and ended and abandoned of each work
_hung: dict[Hashable, _Work] = {}
_idle: list[Worker] = []
"""The storage thread that waits for work: to start one takes milliseconds on a busy machine (two more turns)."""


def bounded(what: str, path: Hashable, seconds: float, function: Callable[[], T]) -> T:
    """Run ``function``, which operates on ``path``, in a storage thread; return its result or raise its error. ``path``
    is a place of either kind (``object_path.py``, which imports this module).

    Raises :class:`HungError` if no operation of it ends for ``seconds``. Any thread; it waits without the GIL.
    """
    work = _Work(what)

    def run() -> T:
        before, _current.work = _current.work, work
        try:
            return function()
        finally:
            _current.work = before
            with _lock:
                work.ended = True
                if _hung.get(path) is work:
                    del _hung[path]

    done = _start(run)
    while not wait([done], min(_LOOK_SECONDS, seconds)).done:
        with _lock:
            if work.ended or work.still < seconds:
                continue
            work.abandoned = True
            _hung[path] = work
        raise HungError(
            errno.ETIMEDOUT,
            f"{what} has not returned for {work.still:.0f} s: {work.trouble or 'does storage answer?'}",
            str(path),
        )
    return done.result()


def finished_within(seconds: float, function: Callable[[], object]) -> bool:
    """Run ``function`` in a storage thread; return whether it ended within ``seconds``. If not, it goes on."""
    done = _start(function)
    if not wait([done], seconds).done:
        return False
    done.result()
    return True


def is_hung(path: Hashable) -> bool:
    """Whether an abandoned operation on ``path`` has not returned yet: another would wait, too."""
    with _lock:
        return path in _hung


def check_not_hung(path: Hashable) -> None:
    """Raise :class:`HungError` if the path :func:`is_hung`."""
    with _lock:
        work = _hung.get(path)
    if work is not None:
        raise HungError(
            errno.ETIMEDOUT,
            f"{work.what} by an earlier save has not returned for {work.still:.0f} s; saves to this path fail until it "
            f"does, saves to other paths go on",
            str(path),
        )


def step() -> None:
    """Called before each file operation: unwinds the calling thread's work if it was abandoned."""
    if (work := _current.work) is not None:
        if work.abandoned:
            raise _Abandoned
        work.moved_at, work.trouble = time.monotonic(), None


def troubled(trouble: str | None) -> None:
    """Called between the tries of one operation: unwinds as :func:`step` does, without counting as progress.

    ``trouble`` is what storage answers, for the error if the work is given up; None keeps what was said.
    """
    if (work := _current.work) is not None:
        if work.abandoned:
            raise _Abandoned
        work.trouble = trouble or work.trouble


def _start(function: Callable[[], T]) -> Future[T]:
    done: Future[T] = Future()
    try:
        worker = _idle.pop()  # without a lock: signal handlers come here, too
    except IndexError:
        worker = Worker("dcp_datastates-storage")

    def run() -> None:
        try:
            settle = partial(done.set_result, function())
        except BaseException as error:
            settle = partial(done.set_exception, error)
        # First: the caller may have the next work for it immediately.
        if _idle:
            worker.finish()
        else:
            _idle.append(worker)
        settle()
        del settle  # the traceback of its error has this frame

    if not worker.post(run):  # no thread can start: better without a bound than not
        run()
    return done
