"""What storage at a root can do, tried there: before its first save in a process, and by ``dcp-datastates doctor``.

File systems and stores that look alike differ in what they carry out, and in what credentials may do. Each operation
that a save relies on is tried, on files or objects of its own. For each that is missing there is a fallback, which is
said once, or the save is refused before it has written anything, by an error that says what would help.

Storage that fails, or does not answer, gives no answer: that is an error, and the next save tries again.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dcp_datastates.errors import StorageError
from dcp_datastates.storage import operations, presence, trials
from dcp_datastates.storage.bounded import bounded
from dcp_datastates.storage.local import explained
from dcp_datastates.storage.object_path import Location, ObjectPath
from dcp_datastates.storage.trials import Operation

__all__ = [
    "Answer",
    "Findings",
    "Operation",
    "examine",
    "what_it_says",
    "what_works",
    "what_works_for",
]

logger = logging.getLogger(__name__)

_ASKED_SECONDS: Final = 3.0
_REMEMBERED: Final = 64
"""Roots."""


@dataclass(frozen=True)
class _Lack:
    """What it means that an operation is missing."""

    text: str
    needed: bool = False
    """Whether no save can go without it."""
    quiet: bool = False
    """Whether that is no news for who saves there."""


_IN_A_DIRECTORY: Final = {
    Operation.CREATE_ONCE: _Lack(
        "two processes can create the same file, so this package cannot tell which of two saves to one path came "
        "first: use each path from one job at a time"
    ),
    Operation.REPLACE: _Lack("no checkpoint can be overwritten: save each to a path of its own"),
    Operation.SHRINK: _Lack(
        "files keep the bytes that pad their last write, and no load takes them. A bucket that is mounted by s3fs: "
        "save to s3://bucket/… instead",
        needed=True,
    ),
    Operation.SYNC_DIRECTORY: _Lack(
        "saves go without it: after a crash of the server, the newest checkpoint may be missing"
    ),
    Operation.LIST: _Lack("grant permission to read the directory (r and x)", needed=True),
    Operation.RANGE: _Lack("no load could read what is saved", needed=True),
    Operation.DELETE: _Lack(
        "saves are committed, and all that they should remove stays: grant permission to delete, or remove it by hand"
    ),
}

_IN_A_STORE: Final = {
    Operation.PUT: _Lack("grant permission to store objects (S3: s3:PutObject)", needed=True),
    Operation.CREATE_ONCE: _Lack(
        "two processes can create the same object, so this package cannot tell which of two saves to one path came "
        "first: use each path from one job at a time, and see docs/stores.md for what is not promised there"
    ),
    Operation.REPLACE: _Lack(
        "grant permission to overwrite objects (S3: s3:PutObject)", needed=True
    ),
    Operation.LIST: _Lack("grant permission to list the bucket (S3: s3:ListBucket)", needed=True),
    Operation.RANGE: _Lack(
        "no load could read what is saved: grant permission to read objects (S3: s3:GetObject), or use a server that "
        "answers a request for a range with status 206",
        needed=True,
    ),
    Operation.DELETE: _Lack(
        "saves are committed, and all that they should remove stays: grant permission to delete objects (S3: "
        "s3:DeleteObject), or give the bucket a lifecycle rule"
    ),
    Operation.DELETE_MANY: _Lack("each object is deleted by a request of its own", quiet=True),
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


_lock = threading.RLock()  # guards _known
_known: OrderedDict[tuple[Location, object], Findings] = OrderedDict()
"""By root and its store, or its device: something else may be mounted there later."""


def what_works_for(directory: Path) -> Findings:
    """As :func:`what_works`, of the file system that holds ``directory``, or where that was."""
    root = directory.parent
    status = presence.status_of(directory)
    with explained("stat", root):
        alike = status is None or os.stat(root).st_dev == status.st_dev
    return what_works(root if alike and os.access(root, os.W_OK | os.X_OK) else directory)


def what_works(root: Location) -> Findings:
    """What storage at ``root``, an existing directory or a prefix in a store, can do. The first call for a root tries
    it, says once what is missing, and waits for storage.

    Raises :class:`StorageError` if saves cannot work there, or storage fails. Any thread.
    """
    if isinstance(root, ObjectPath):
        key: tuple[Location, object] = root, root.store
    else:
        with explained("stat", root):
            key = root, os.stat(root).st_dev
    with _lock:
        found = _known.get(key)
    if found is not None:
        return found
    found = examine(root)
    if (missing := found.missing) is not None:
        # Not remembered: it may be granted, or mounted otherwise, until the next save.
        raise StorageError(errno.EOPNOTSUPP, _said(missing), str(root))
    with _lock:
        is_new = key not in _known
        _known[key] = found
        while len(_known) > _REMEMBERED:
            _known.popitem(last=False)
    for each in found.answers if is_new else ():
        if not each.works:
            level = logging.DEBUG if _lacks(root)[each.operation].quiet else logging.WARNING
            logger.log(level, "%s: %s", root, _said(each))
    return found


def what_it_says(path: Location | None) -> str:
    """Text to append to the error of a save to ``path`` that makes no progress: what its store answers. The libraries
    do not tell why an upload stands still. Empty if it answers well, and for a directory. Takes some seconds.
    """
    if not isinstance(path, ObjectPath):
        return ""
    try:
        bounded("a request", (path, "asked"), _ASKED_SECONDS, lambda: examine(path.parent))
    except StorageError as error:
        return f"; the store: {error.strerror}"
    return ""


def _said(answer: Answer) -> str:
    return f"storage there has no {answer.operation.value!r} ({answer.cause}): {answer.meaning}"


def _lacks(root: Location) -> Mapping[Operation, _Lack]:
    return _IN_A_STORE if isinstance(root, ObjectPath) else _IN_A_DIRECTORY


def examine(root: Location) -> Findings:
    """Try all operations at ``root``, on files or objects that are deleted again. A directory must exist.

    Raises :class:`StorageError`: storage fails, or nothing can be stored there. Any thread; waits for storage.
    """
    began, lacks = time.monotonic(), _lacks(root)
    if isinstance(root, ObjectPath):
        causes = trials.in_a_store(root)
    else:
        doing = explained("trying what the file system can do", root)
        with operations.during(operations.SELF_TEST), doing:
            causes = trials.in_a_directory(root)
    answers = tuple(
        Answer(
            operation,
            cause is None,
            cause or "",
            "" if cause is None else lacks[operation].text,
            lacks[operation].needed,
        )
        for operation, cause in causes.items()
    )
    return Findings(root, answers, time.monotonic() - began)
