"""Locks that mark attempts in flight, and end with the process that holds them.

They are ``flock(2)`` locks on directories, so they add no file to a checkpoint. A file system may lack locks
(:func:`in_flight` returns None), or grant them on each host separately (NFS, Lustre). So no guarantee relies on locks:
they only keep ``retain``, ``delete`` and cleanup away from saves in flight.
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
from dcp_datastates.storage.bounded import step

__all__ = ["Hold", "asking", "exclusive", "if_free", "in_flight"]

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.02
_ASKING_SECONDS: Final = 5.0
"""How long processes that only ask may keep a :class:`Hold` waiting."""

_FREE_SECONDS: Final = 2.0
"""How long a publication waits for a process that deletes or pins there."""
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
    """Try to take the lock; returns whether it was taken, None if there are no locks."""
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
    """Marks an attempt as in flight, until :meth:`release` or the end of this process."""

    def __init__(self, directory: Path) -> None:
        self._descriptor: int | None = None  # for __del__, if the next lines raise
        self._process = os.getpid()
        self._descriptor = _open(directory)
        # An exclusive lock; processes that ask take shared locks, so that ranks asking at once do not mistake each
        # other for a holder.
        _wait_for(self._descriptor, _ASKING_SECONDS)

    @staticmethod
    def on(directory: Path) -> Hold | None:
        """Hold a directory that was just created; None if another process removed it before it was held."""
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
        """Release the lock. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and os.getpid() == self._process:
            _close(descriptor)

    def __del__(self) -> None:
        self.release()


def in_flight(directory: Path) -> bool | None:
    """Whether a live process holds the attempt in ``directory``; None if that is unknown."""
    with asking(directory) as answer:
        return answer


@contextlib.contextmanager
def asking(directory: Path) -> Iterator[bool | None]:
    """Like :func:`in_flight`; until the context ends, no process can begin to hold the directory."""
    try:
        descriptor = _open(directory)
    except (FileNotFoundError, NotADirectoryError):
        yield False  # gone, or no attempt
        return
    except OSError:
        yield True  # too many open files, say: assume that it is in flight
        return
    try:
        # A shared lock, so that ranks which ask at once do not see each other.
        try:
            got = _try(descriptor, fcntl.LOCK_SH)
        except OSError:
            got = None
        yield None if got is None else not got
    finally:
        _close(descriptor)


@contextlib.contextmanager
def exclusive(directory: Path, seconds: float) -> Iterator[None]:
    """Hold the path's lock, if the file system has locks.

    Raises :class:`StorageError` if another process does not release the lock within ``seconds``.
    """
    descriptor = _open(directory)
    try:
        if not _wait_for(descriptor, seconds):
            raise StorageError(
                errno.EWOULDBLOCK,
                f"another process has held the lock of the directory for {seconds:g} s; is a job stopped while it "
                f"publishes, pins or deletes there?",
                str(directory),
            )
        yield
    finally:
        _close(descriptor)


@contextlib.contextmanager
def if_free(directory: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the path's lock if it can be had soon; calls ``waiting`` now and then until then.

    For a publication, which needs no lock: it only lets a process that deletes or pins there finish first. Whoever may
    read the directory may lock it, for as long as they like.
    """
    try:
        descriptor = _open(directory)
    except OSError:  # the publication finds the cause
        yield
        return
    try:
        if not _wait_for(descriptor, _FREE_SECONDS, waiting):
            logger.warning(
                "another process has held the lock of %s for %g s; publishing without it",
                directory,
                _FREE_SECONDS,
            )
        yield
    finally:
        _close(descriptor)


def _wait_for(descriptor: int, seconds: float, waiting: Callable[[], None] = lambda: None) -> bool:
    """Take the lock; returns False if it is not free within ``seconds``."""
    deadline = time.monotonic() + seconds
    while _try(descriptor, fcntl.LOCK_EX) is False:
        if time.monotonic() > deadline:
            return False
        waiting()
        step()
        time.sleep(_POLL_SECONDS)
    return True


@after_fork
def _close_in_child() -> None:
    # A forked child shares its parent's locks, which would then outlive the parent.
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()
