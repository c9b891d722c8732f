"""What lies at a path: the one place that asks whether there is something.

Only the answer that there is no such name means that nothing is there. A file server that is away, a permission that is
missing, and a path that is too long say nothing about what is there: that is a :class:`StorageError`, which names the
path and the cause. A caller that took it for "nothing" would start a job from scratch, and delete what it did not see.

Errors that pass, such as those of a server that has just been restarted, are tried again, within a second. A test
forbids ``exists``, ``lexists``, ``is_file`` and their like elsewhere, for these take most errors for "nothing".
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from dcp_datastates.errors import StorageError
from dcp_datastates.storage.object_store import ObjectMissingError, ObjectStore

K = TypeVar("K")
T = TypeVar("T")

_PASSING: Final = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN)
_PAUSES: Final = (0.02, 0.1, 0.5)
"""Seconds before each further try."""

_REST_SECONDS: Final = 10.0
"""For so long after all tries have failed, each operation is tried once: a root may hold thousands of names."""

_failed_at = -_REST_SECONDS

_THREADS: Final = 8
_FEW: Final = 16
"""Files of a local disk that one thread has looked at before others start."""

_WAYS_OUT: Final = {
    errno.EACCES: "let this user read it, or move it away",
    errno.EPERM: "let this user read it, or move it away",
    errno.ELOOP: "mend or remove the symbolic links",
    errno.ENAMETOOLONG: "use a shorter path",
}
_WAIT: Final = "try again when storage answers"


class NotAFileError(StorageError):
    """There is something other than a file: a pipe, a device, a cycle of links. So it is certainly no checkpoint's."""


def look_at_each(look: Callable[[K], T], places: Iterable[K], few: int = _FEW) -> list[T]:
    """What ``look`` returns for each of ``places``, in their order. Several threads look at more than ``few``: a shared
    file system takes a millisecond for each, and a store some dozens.
    """
    them = list(places)
    if len(them) <= few:
        return list(map(look, them))
    with ThreadPoolExecutor(_THREADS) as executor:
        return list(executor.map(look, them))


def judged(look: Callable[[Any], T], path: str | os.PathLike[str]) -> T | None:
    """What ``look`` tells of ``path``, tried again after errors that pass; None if there is nothing. Any thread.

    Raises :class:`StorageError`. One of ``look`` itself is final: whoever raised it, has tried as often as it should.
    """
    global _failed_at
    pauses = iter(() if time.monotonic() - _failed_at < _REST_SECONDS else _PAUSES)
    while True:
        try:
            return look(path)
        except StorageError:
            raise
        except OSError as error:
            if _is_missing(error, path):
                return None
            passes = error.errno in _PASSING
            if not passes or (pause := next(pauses, None)) is None:
                _failed_at = time.monotonic() if passes else _failed_at
                cause = os.strerror(error.errno or 0)
                way_out = _WAYS_OUT.get(error.errno or 0, _WAIT)
                why = f"what is there is unknown: {cause}; {way_out}"
                raise StorageError(error.errno, why, str(path)) from error
        time.sleep(pause)


def _is_missing(error: OSError, path: str | os.PathLike[str]) -> bool:
    """Whether there is no such name; or a parent of ``path`` is a file, and not only said to be none."""
    if isinstance(error, NotADirectoryError):
        for each in (Path(path), *Path(path).parents):
            with contextlib.suppress(OSError):
                return not stat.S_ISDIR(os.stat(each).st_mode)
    return isinstance(error, FileNotFoundError)


def status_of(path: str | os.PathLike[str]) -> os.stat_result | None:
    """The status of what ``path`` leads to; None for nothing, and a circle of links. Raises :class:`StorageError`."""
    try:
        return judged(os.stat, path)
    except StorageError as error:
        if error.errno == errno.ELOOP and is_link(path):
            return None
        raise


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a name of anything, a symbolic link that leads nowhere too. Raises :class:`StorageError`."""
    return judged(os.lstat, path) is not None


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` leads to a directory. Raises :class:`StorageError`."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` leads to a regular file. Raises :class:`StorageError`."""
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def is_link(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a symbolic link. Raises :class:`StorageError`."""
    status = judged(os.lstat, path)
    return status is not None and stat.S_ISLNK(status.st_mode)


def check_answers(store: ObjectStore, prefix: str) -> None:
    """``store`` has listed nothing below ``prefix``. Raise :class:`StorageError` if it is not the store that answers: a
    proxy that answers each request with a page has an empty list, too, and each object. One request.
    """
    key = f"{prefix}/.nothing-{secrets.token_hex(8)}".lstrip("/")
    try:
        store.size(key)
    except ObjectMissingError:
        return
    except StorageError as error:
        # S3 answers so for what is missing, where a policy grants the list of this prefix alone.
        if error.errno == errno.EACCES:
            return
        raise
    raise web_page(f"{store.url}/{key}")


def is_page(data: bytes) -> bool:
    """Whether ``data`` begin as a web page does."""
    return data[:64].lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml"))


def web_page(path: object) -> StorageError:
    """The error for a web page in place of what is at ``path``."""
    return StorageError(
        errno.EPROTO,
        "what is there is unknown: a web page came in place of it, from a proxy or a server that is down; check "
        "what stands between this machine and storage (http_proxy, the endpoint)",
        str(path),
    )


def names_in(directory: str | os.PathLike[str]) -> list[str]:
    """The names in a directory; none if there is no directory. Raises :class:`StorageError`."""
    return judged(os.listdir, directory) or []


def entries_in(directory: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    """:func:`names_in`, with what the system tells of each."""
    return judged(_scanned, directory) or []


def _scanned(directory: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        return list(entries)
