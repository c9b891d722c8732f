"""What storage at a root can do, tried there: before its first save in a process, and by ``dcp-datastates doctor``.

File systems and stores that look alike differ in what they carry out, and in what credentials may do. Each operation
that a save relies on is tried once, as the save calls it (:mod:`object_store`), on objects that are deleted again. For
each that is missing there is a fallback, which is said once, or the save is refused before it has written anything, by
an error that says what would help.

Storage that fails, or does not answer, gives no answer: that is an error, and the next save tries again.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from dcp_datastates.errors import StorageError
from dcp_datastates.storage import local_store, operations
from dcp_datastates.storage.attempts import INDEX_NAME
from dcp_datastates.storage.bounded import bounded, step
from dcp_datastates.storage.local import explained
from dcp_datastates.storage.object_path import Location, ObjectPath, stored
from dcp_datastates.storage.object_store import ObjectMissingError
from dcp_datastates.storage.presence import status_of
from dcp_datastates.storage.store_calls import BusyError, ExpiredError

logger = logging.getLogger(__name__)

_ASKED_SECONDS: Final = 3.0


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


_NEEDED: Final = (Operation.PUT, Operation.SHRINK, Operation.LIST, Operation.RANGE)
"""No save can go without these; in a store, not without :attr:`Operation.REPLACE` either."""

_MEANS_IN_A_DIRECTORY: Final = {
    Operation.PUT: "grant permission to write to the directory",
    Operation.CREATE_ONCE: "two processes can create the same file, so this package cannot tell which of two saves to "
    "one path came first: use each path from one job at a time",
    Operation.REPLACE: "no checkpoint can be overwritten: save each to a path of its own",
    Operation.SHRINK: "files keep the bytes that pad their last write, and no load takes them. A bucket that is "
    "mounted by s3fs: save to s3://bucket/… instead",
    Operation.SYNC_DIRECTORY: "saves go without it: after a crash of the server, the newest checkpoint may be missing",
    Operation.LIST: "grant permission to read the directory (r and x)",
    Operation.RANGE: "no load could read what is saved",
    Operation.DELETE: "saves are committed, and all that they should remove stays: grant permission to delete, or "
    "remove it by hand",
}

_MEANS_IN_A_STORE: Final = {
    Operation.PUT: "grant permission to store objects (S3: s3:PutObject)",
    Operation.CREATE_ONCE: "two processes can create the same object, so this package cannot tell which of two saves "
    "to one path came first: use each path from one job at a time, and see docs/stores.md for what is not promised "
    "there",
    Operation.REPLACE: "grant permission to overwrite objects (S3: s3:PutObject)",
    Operation.LIST: "grant permission to list the bucket (S3: s3:ListBucket)",
    Operation.RANGE: "no load could read what is saved: grant permission to read objects (S3: s3:GetObject), or use a "
    "server that answers a request for a range with status 206",
    Operation.DELETE: "saves are committed, and all that they should remove stays: grant permission to delete objects "
    "(S3: s3:DeleteObject), or give the bucket a lifecycle rule",
}


@dataclass(frozen=True)
class Answer:
    """What came of one operation."""

    operation: Operation
    works: bool
    cause: str
    """What storage said; empty if it works."""
    meaning: str
    """What is done without the operation, or what is to be done; empty if it works."""
    needed: bool
    """Whether no save can go without the operation."""


@dataclass(frozen=True)
class Findings:
    """What storage at ``root`` can do."""

    root: Location
    answers: tuple[Answer, ...]
    seconds: float

    def works(self, operation: Operation) -> bool:
        """Whether the operation works, or does not apply."""
        return all(each.works for each in self.answers if each.operation is operation)

    @property
    def missing(self) -> Answer | None:
        """The first operation that every save needs, and that does not work; None if saves work."""
        return next((each for each in self.answers if each.needed and not each.works), None)


def what_works_for(directory: ObjectPath) -> Findings:
    """As :func:`what_works`, of the storage in which the checkpoint ``directory`` lies, or is to lie."""
    root = directory.parent
    if directory.is_local:
        status = status_of(str(directory))
        with explained("stat", root):
            alike = status is None or os.stat(str(root)).st_dev == status.st_dev
        if not (alike and os.access(str(root), os.W_OK | os.X_OK)):
            return what_works(directory)
    return what_works(root)


def what_works(root: Location) -> Findings:
    """What storage at ``root``, an existing directory or a prefix in a store, can do: tried once, and said once.

    Raises :class:`StorageError` if saves cannot work there, or storage fails. Any thread.
    """
    place = stored(root)
    with explained("stat", root):
        mounted: Any = os.stat(str(place)).st_dev if place.is_local else place.store
    return _remembered(place, mounted)


@functools.lru_cache(maxsize=64)
def _remembered(root: ObjectPath, mounted: Any) -> Findings:
    """``mounted``: the store, or the device's number. An error is not remembered: what is missing may be granted."""
    found = examine(root)
    if (missing := found.missing) is not None:
        raise StorageError(errno.EOPNOTSUPP, _said(missing), str(root))
    for each in found.answers:
        if not each.works:
            logger.warning("%s: %s", root, _said(each))
    return found


def what_it_says(path: Location | None) -> str:
    """What the store of a save without progress answers, for its error; empty if that is well. Takes some seconds."""
    if not isinstance(path, ObjectPath):
        return ""
    try:
        bounded("a request", (path, "asked"), _ASKED_SECONDS, lambda: examine(path.parent))
    except StorageError as error:
        return f"; the store: {error.strerror}"
    return ""


def _said(answer: Answer) -> str:
    return f"storage there has no {answer.operation.value!r} ({answer.cause}): {answer.meaning}"


def examine(root: Location) -> Findings:
    """Try all operations at ``root``, on objects that are deleted again. A directory must exist.

    Raises :class:`StorageError`: storage fails, or nothing can be stored there. Any thread; waits for storage.
    """
    began, place = time.monotonic(), stored(root)
    name = f"self-test.{secrets.token_hex(8)}"
    causes: _Causes = {}
    with operations.during(operations.SELF_TEST), explained("trying what storage can do", root):
        if place.is_local:
            _try_directory(place, place / f".{name}", causes)
        else:
            _try_store(place / INDEX_NAME / name, causes)
    means = _MEANS_IN_A_DIRECTORY if place.is_local else _MEANS_IN_A_STORE
    needed = _NEEDED if place.is_local else (*_NEEDED, Operation.REPLACE)
    answers = tuple(
        Answer(each, cause is None, cause or "", means[each] if cause else "", each in needed)
        for each, cause in causes.items()
    )
    return Findings(root, answers, time.monotonic() - began)


# ---- trials --------------------------------------------------------------------------------------

_Causes = dict[Operation, str | None]
"""By operation why it does not work; None: it does."""

_RACING: Final = 4
"""Creations of one object at the same time."""

_NAME: Final = re.compile(r"\.self-test\.[0-9a-f]{16}")
_OLD_SECONDS: Final = 3600.0
"""What a process that was killed during its self-test left behind is older than this, by the file system's clock."""

_LONG: Final = 8192
_SHORT: Final = 5000
"""Bytes. Direct writes are padded to whole blocks, and then cut off."""

_REFUSALS: Final = (errno.EACCES, errno.EPERM, errno.EOPNOTSUPP)
"""By these, a store says what it does not carry out. Others are failures."""

_NO_ANSWER: Final = {
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO, errno.ENOTCONN),
    *(errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC),
    *(errno.EDQUOT, errno.EROFS, errno.EHOSTDOWN),
}
"""A file system is in trouble: what it can do is unknown. Others are answers."""


def _try_directory(root: ObjectPath, folder: ObjectPath, causes: _Causes) -> None:
    # The root, before anything changes there: to sync a change takes a disk milliseconds.
    causes[Operation.SYNC_DIRECTORY] = _cause(root, lambda: _sync(Path(str(root))))
    step()
    local_store.make_folder(folder.key, operations.SELF_TEST)
    now = os.stat(str(folder)).st_mtime
    _try_store(folder, causes)
    with contextlib.suppress(OSError):
        for name in filter(_NAME.fullmatch, os.listdir(str(root))):
            with contextlib.suppress(OSError):
                if os.stat(str(root / name)).st_mtime < now - _OLD_SECONDS:
                    _delete(root / name)


def _try_store(folder: ObjectPath, causes: _Causes) -> None:
    """Try the operations of a store, with two objects in ``folder``. Eleven requests."""
    store, created, replaced = folder.store, (folder / "a").key, (folder / "b").key
    try:
        causes[Operation.PUT] = _cause(folder, lambda: store.put(replaced, b"brother"))
        if causes[Operation.PUT] is not None:
            return
        if folder.is_local:
            causes[Operation.SHRINK] = _cause(folder, lambda: _shrink(Path(str(folder / "c"))))
        causes[Operation.CREATE_ONCE] = _create_once(folder, created)
        causes[Operation.REPLACE] = _cause(folder, lambda: store.put(replaced, b"another"))
        causes[Operation.RANGE] = _cause(
            folder, lambda: _differs(bytes(store.get_range(replaced, 2, 5)), b"oth")
        )
        causes[Operation.LIST] = _cause(folder, lambda: _unlisted(folder, replaced))
    finally:
        causes[Operation.DELETE] = _cause(folder, lambda: _delete(folder))


def _cause(place: ObjectPath, request: Callable[[], object]) -> str | None:
    """Why storage at ``place`` does not carry out ``request``; None if it does. Raises what says nothing about that."""
    step()
    try:
        return cause if isinstance(cause := request(), str) else None
    except ObjectMissingError:
        return "what was stored a moment ago is not found"
    except (BusyError, ExpiredError):
        raise
    except OSError as error:
        if error.errno in _NO_ANSWER or not (place.is_local or error.errno in _REFUSALS):
            raise
        return str(error.strerror)


def _differs(found: object, expected: object) -> str | None:
    return None if found == expected else f"{found!r} came, and not {expected!r}"


def _unlisted(folder: ObjectPath, key: str) -> str | None:
    listed = {each.key for each in folder.store.list(folder.key).objects}
    return None if key in listed else "what was stored is not in the list"


def _delete(folder: ObjectPath) -> str | None:
    """An error that does not tell of a permission is no answer: later deletions may work, and no save fails for it."""
    try:
        folder.store.delete([(folder / name).key for name in ("a", "b", "c")])
        if folder.is_local and not local_store.remove_folder(folder.key):
            return "the directory of the trial is not empty"
    except (BusyError, ExpiredError):
        raise
    except StorageError as error:
        if error.errno != errno.EIO:
            raise
        logger.warning("what the self-test has stored stays there, such as %s: %s", folder, error)
    return None


def _create_once(folder: ObjectPath, key: str) -> str | None:
    """Create one object several times: some stores ignore the condition, or check it before they store the object."""
    create = folder.store.put_if_absent
    cause = (
        _cause(folder, lambda: _differs(create(key, b"0"), True))
        if folder.is_local  # the system's calls are atomic where they work
        else _race(folder, key)
    )
    return cause or _cause(folder, lambda: _differs(create(key, b""), False))


def _race(folder: ObjectPath, key: str) -> str | None:
    store, together = folder.store, threading.Barrier(_RACING)

    def create(number: int) -> bool | StorageError:
        together.wait()
        try:
            return store.put_if_absent(key, b"%d" % number)
        except StorageError as error:
            return error

    with ThreadPoolExecutor(_RACING, "dcp_datastates-self-test") as executor:
        try:
            creations = [executor.submit(create, number) for number in range(_RACING)]
        except RuntimeError as error:
            together.abort()
            raise StorageError(
                errno.EAGAIN, f"the system starts no more threads ({error})", str(folder)
            ) from error
    results = [each.result() for each in creations]
    failures = [each for each in results if isinstance(each, StorageError)]
    for each in failures:
        if each.errno == errno.EOPNOTSUPP:
            return each.strerror
    if failures and True not in results:
        raise failures[0]
    if (winners := results.count(True)) > 1:
        return f"{winners} of {_RACING} creations at the same time succeeded"
    # None may have won, by its own account: if the reply to the winner's request was lost.
    return _cause(folder, lambda: None if store.get(key) else "the object is empty")


def _shrink(path: Path) -> str | None:
    with open(path, "wb", buffering=0) as file:
        file.write(b"a" * _LONG)
        os.ftruncate(file.fileno(), _SHORT)
    found = os.stat(path).st_size, len(path.read_bytes())
    return None if found == (_SHORT, _SHORT) else f"{max(found)} bytes are left of {_SHORT}"


def _sync(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # it may be writable, but not readable: no save syncs it
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
