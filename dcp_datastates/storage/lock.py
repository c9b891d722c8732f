"""Which attempts are in flight: locks that end with the process that holds them.

They are ``flock(2)`` locks on directories, so they add no file to a checkpoint. A file system may have none
(:func:`in_flight` answers None), or grant them on each host by itself (NFS, Lustre). So nothing that must hold relies
on them: they keep ``retain`` and ``delete`` from saves in flight, and what is tidied from what is not over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from dcp_datastates.errors import StorageError
from dcp_datastates.process.forks import ProcessLock, after_fork

__all__ = ["Hold", "asking", "exclusive", "in_flight"]

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.02
_ASKING_SECONDS: Final = 5.0
"""How long others, who only ask, may keep a :class:`Hold` waiting."""

_ASKING_PAUSE: Final = 0.001
_UNSUPPORTED: Final = (
    errno.EBADF,
    errno.EINVAL,
    errno.ENOLCK,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EISDIR,
)

_lock = ProcessLock()  # guards _descriptors
_descriptors: set[int] = set()


def _open(directory: Path) -> int:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with _lock:
        _descriptors.add(descriptor)
    return descriptor


def _close(descriptor: int) -> None:
    with _lock:
        _descriptors.discard(descriptor)
    os.close(descriptor)


def _try(descriptor: int, how: int) -> bool | None:
    """Whether the lock was got; None where there are no locks."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


class Hold:
    """Says that an attempt is in flight, until :meth:`release` or the end of this process."""

    def __init__(self, directory: Path) -> None:
        self._descriptor: int | None = None  # should the next line raise
        self._process = os.getpid()
        self._descriptor = _open(directory)
        # Exclusive, and those who ask share: several ranks ask at once, and must not take each other for this.
        deadline = time.monotonic() + _ASKING_SECONDS
        while _try(self._descriptor, fcntl.LOCK_EX) is False and time.monotonic() < deadline:
            time.sleep(_ASKING_PAUSE)

    @staticmethod
    def on(directory: Path) -> Hold | None:
        """A hold on a directory that was made a moment ago; None if it was removed before it was held."""
        try:
            hold = Hold(directory)
        except FileNotFoundError:
            return None
        assert hold._descriptor is not None
        try:
            if os.path.samestat(os.stat(directory), os.fstat(hold._descriptor)):
                return hold
        except FileNotFoundError:
            pass
        hold.release()
        return None

    def release(self) -> None:
        """Let go. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and os.getpid() == self._process:
            _close(descriptor)

    def __del__(self) -> None:
        self.release()


def in_flight(directory: Path) -> bool | None:
    """Whether a live process holds the attempt in ``directory``; None if that cannot be known."""
    with asking(directory) as answer:
        return answer


@contextlib.contextmanager
def asking(directory: Path) -> Iterator[bool | None]:
    """:func:`in_flight`, and no process can begin to hold it before this ends."""
    try:
        descriptor = _open(directory)
    except FileNotFoundError:
        yield False  # gone
        return
    except OSError:
        yield True  # too many open files, say: keep what may be in flight
        return
    try:
        # Shared: ranks that look at once do not see each other.
        try:
            got = _try(descriptor, fcntl.LOCK_SH)
        except OSError:
            got = None
        yield None if got is None else not got
    finally:
        _close(descriptor)


@contextlib.contextmanager
def exclusive(
    directory: Path, seconds: float, waiting: Callable[[], None] = lambda: None
) -> Iterator[bool]:
    """Hold the path's lock; yields False where there are no locks. Calls ``waiting`` now and then until it has it.

    Raises :class:`StorageError` if another process does not let go of it within ``seconds``.
    """
    descriptor = _open(directory)
    try:
        deadline = time.monotonic() + seconds
        while (got := _try(descriptor, fcntl.LOCK_EX)) is False:
            if time.monotonic() > deadline:
                raise StorageError(
                    errno.EWOULDBLOCK,
                    f"another process has been publishing a checkpoint there for {seconds:g} s; is a job "
                    f"stopped in the middle of it?",
                    str(directory),
                )
            waiting()
            time.sleep(_POLL_SECONDS)
        yield bool(got)
    finally:
        _close(descriptor)


@after_fork
def _close_in_child() -> None:
    # A forked child shares its parent's locks: they would outlive the parent.
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()
