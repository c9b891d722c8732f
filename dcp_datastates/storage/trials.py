"""Each operation that a save relies on, tried once, on files or objects of its own that are deleted again.

A trial says why an operation does not work; storage that fails, or does not answer, raises :class:`StorageError` or
OSError.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Final

from dcp_datastates.errors import StorageError
from dcp_datastates.storage.bounded import step
from dcp_datastates.storage.local_store import LocalStore
from dcp_datastates.storage.object_path import ObjectPath
from dcp_datastates.storage.object_store import ObjectMissingError
from dcp_datastates.storage.store_calls import BusyError, ExpiredError
from dcp_datastates.storage.store_index import INDEX_NAME

__all__ = ["Causes", "Operation", "in_a_directory", "in_a_store"]

logger = logging.getLogger(__name__)

_RACING: Final = 4
"""Creations of one object at the same time."""

_NAME: Final = re.compile(r"\.self-test\.[0-9a-f]{16}")
_OLD_SECONDS: Final = 3600.0
"""What a process that was killed during its self-test left behind is older than this, by the file system's clock."""


class Operation(Enum):
    """What is tried. The value is how people call it."""

    PUT = "put"
    CREATE_ONCE = "create once"
    REPLACE = "replace"
    SHRINK = "shrink (truncate)"
    SYNC_DIRECTORY = "fsync of a directory"
    LIST = "list"
    RANGE = "read a range"
    DELETE = "delete"
    DELETE_MANY = "delete many by one request"


Causes = dict[Operation, str | None]
"""By operation why it does not work; None: it does."""


# ---- in a store ----------------------------------------------------------------------------------


def in_a_store(root: ObjectPath) -> Causes:
    """Try the operations of a store, with two objects below ``root``. Eleven requests."""
    beginning = f"self-test.{secrets.token_hex(8)}"
    created, replaced = (root / INDEX_NAME / f"{beginning}.{name}" for name in ("a", "b"))
    store = root.store
    causes = {Operation.PUT: _refusal(lambda: store.put(replaced.key, b"the first"))}
    if causes[Operation.PUT] is not None:
        return causes
    try:
        step()
        causes[Operation.CREATE_ONCE] = _race(created) or _refusal(
            lambda: _differs(store.put_if_absent(created.key, b""), False)
        )
        causes[Operation.REPLACE] = _refusal(lambda: store.put(replaced.key, b"another"))
        causes[Operation.RANGE] = _refusal(
            lambda: _differs(bytes(store.get_range(replaced.key, 2, 5)), b"oth")
        )
        causes[Operation.LIST] = _refusal(lambda: _unlisted(replaced))
    finally:
        causes[Operation.DELETE] = _refusal(lambda: _delete([created, replaced]))
    if causes[Operation.DELETE] is None and not store.deletes_many:
        causes[Operation.DELETE_MANY] = "the server, or the library for it, does not know it"
    return causes


def _refusal(request: Callable[[], object]) -> str | None:
    """Why a store does not carry out ``request``; None if it does. Raises what says nothing about the store."""
    step()
    try:
        return cause if isinstance(cause := request(), str) else None
    except ObjectMissingError:
        return "what was stored a moment ago is not found"
    except (BusyError, ExpiredError):
        raise
    except StorageError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EOPNOTSUPP):
            return error.strerror
        raise


def _delete(paths: Sequence[ObjectPath]) -> None:
    """An error that does not tell of a permission is no answer: later deletions may work, and no save fails for it."""
    try:
        paths[0].store.delete([path.key for path in paths])
    except (BusyError, ExpiredError):
        raise
    except StorageError as error:
        if error.errno != errno.EIO:
            raise
        logger.warning("what the self-test has stored stays there, such as %s: %s", paths[0], error)


def _unlisted(path: ObjectPath) -> str | None:
    listed = path.store.list(path.parent.key).objects
    return (
        None
        if path.key in {each.key for each in listed}
        else "an object that was stored is not in the list"
    )


def _differs(found: object, expected: object) -> str | None:
    return None if found == expected else f"{found!r} came, and not {expected!r}"


def _race(path: ObjectPath) -> str | None:
    """Create one object several times at once. Some stores ignore the condition of a request, or check it before they
    store the object, so that two requests at once may both succeed.
    """
    store = path.store
    results: list[bool | StorageError] = []
    together = threading.Barrier(_RACING)

    def create(number: int) -> None:
        try:
            together.wait()
        except threading.BrokenBarrierError:
            return
        try:
            results.append(store.put_if_absent(path.key, b"%d" % number))
        except StorageError as error:
            results.append(error)

    threads = [
        threading.Thread(
            target=create, args=(number,), name="dcp_datastates-self-test", daemon=True
        )
        for number in range(_RACING)
    ]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as error:
        together.abort()
        raise StorageError(
            errno.EAGAIN, f"the system starts no more threads ({error})", str(path)
        ) from error
    for thread in threads:
        thread.join()
    failures = [each for each in results if isinstance(each, StorageError)]
    for each in failures:
        if each.errno == errno.EOPNOTSUPP:
            return each.strerror
    if failures and True not in results:
        raise failures[0]
    if (winners := results.count(True)) > 1:
        return f"{winners} of {_RACING} creations at once succeeded"
    # None may have won, by its own account: if the reply to the winner's request was lost.
    return _refusal(lambda: None if store.get(path.key)[0] else "the object is empty")


# ---- in a directory ------------------------------------------------------------------------------

_NO_ANSWER: Final = {
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO, errno.ENOTCONN),
    *(errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC),
    *(errno.EDQUOT, errno.EROFS, errno.EHOSTDOWN),
}
"""Storage is in trouble: what it can do is unknown."""

_LONG: Final = 8192
_SHORT: Final = 5000
"""Bytes. Direct writes are padded to whole blocks, and then cut off."""


def in_a_directory(root: Path) -> Causes:
    """Try the operations of a file system, in a directory of its own in ``root``, which exists."""
    folder = root / f".self-test.{secrets.token_hex(8)}"
    step()
    # The root, before anything changes there: to sync a change takes a disk milliseconds.
    causes = {Operation.SYNC_DIRECTORY: _denial(_sync, root)}
    step()
    os.mkdir(folder)
    now = os.stat(folder).st_mtime
    try:
        for operation, attempt in (
            (Operation.SHRINK, _shrink),
            (Operation.CREATE_ONCE, _create_once),
            (Operation.RANGE, _read_range),
            (Operation.REPLACE, _replace),
            (Operation.LIST, _list),
        ):
            step()
            causes[operation] = _denial(attempt, folder)
    finally:
        step()
        causes[Operation.DELETE] = _denial(_remove, folder)
    _remove_old(root, now)
    return causes


def _denial(attempt: Callable[[Path], object], folder: Path) -> str | None:
    """Why a file system does not carry out ``attempt``; None if it does."""
    try:
        return cause if isinstance(cause := attempt(folder), str) else None
    except OSError as error:
        if error.errno in _NO_ANSWER:
            raise
        return f"{errno.errorcode.get(error.errno or 0, error.errno)}, {error.strerror}"


def _create_once(folder: Path) -> str | None:
    key = str(folder / "decision").lstrip("/")
    created = [LocalStore().put_if_absent(key, data) for data in (b"a", b"b")]
    return None if created == [True, False] else "a name that exists can be created again"


def _shrink(folder: Path) -> str | None:
    with open(folder / "a", "wb", buffering=0) as file:
        file.write(b"a" * _LONG)
        os.ftruncate(file.fileno(), _SHORT)
    found = os.stat(folder / "a").st_size, len((folder / "a").read_bytes())
    return None if found == (_SHORT, _SHORT) else f"{max(found)} bytes are left of {_SHORT}"


def _read_range(folder: Path) -> str | None:
    with open(folder / "a", "rb", buffering=0) as file:
        return _differs(os.pread(file.fileno(), 3, 4096), b"aaa")


def _replace(folder: Path) -> str | None:
    (folder / "b").write_bytes(b"b")
    os.rename(folder / "b", folder / "a")
    return _differs((folder / "a").read_bytes(), b"b")


def _list(folder: Path) -> str | None:
    return None if "a" in os.listdir(folder) else "a file that was made is not in the list"


def _sync(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # it may be writable, but not readable: no save syncs it
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    for name in ("a", "b", "decision/object", "decision"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            os.unlink(folder / name)
    for name in ("decision", ""):
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(folder / name)


def _remove_old(root: Path, now: float) -> None:
    """Remove what killed processes have left of their self-tests. ``now``: by the file system's clock. Never raises."""
    with contextlib.suppress(OSError):
        for name in filter(_NAME.fullmatch, os.listdir(root)):
            with contextlib.suppress(OSError):
                if os.stat(root / name).st_mtime < now - _OLD_SECONDS:
                    _remove(root / name)
