"""What storage at a root can do, tried there: before its first save in a process, and by ``dcp-datastates doctor``.

File systems and stores that look alike differ in what they carry out, and in what credentials may do. Each operation
that a save relies on is tried once, as the save calls it (:mod:`object_store`), on objects that are deleted again. For
each that is missing there is a fallback, which is said once, or the save is refused before it has written anything, by
an error that says what would help.

Storage that fails, or does not answer, gives no answer: that is an error, and the next save tries again.
"""

from __future__ import annotations

import errno
import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Final

from dcp_datastates.errors import StorageError
from dcp_datastates.storage import local_store, operations
from dcp_datastates.storage.attempts import INDEX_NAME
from dcp_datastates.storage.bounded import bounded, step
from dcp_datastates.storage.local import explained
from dcp_datastates.storage.object_path import Location, ObjectPath, stored
from dcp_datastates.storage.object_store import ObjectMissingError
from dcp_datastates.storage.store_calls import BusyError, ExpiredError

logger = logging.getLogger(__name__)

_ASKED_SECONDS: Final = 3.0


class Operation(Enum):
    """What is tried. The value is how people call it."""

    PUT = "put"
    CREATE_ONCE = "create once"
    REPLACE = "replace"
    RANGE = "read a range"
    LIST = "list"
    DELETE = "delete"


_NEEDED: Final = (Operation.PUT, Operation.LIST, Operation.RANGE)
"""No save can go without these."""

_MEANS: Final = {
    Operation.PUT: "grant permission to write to the directory, or to store objects (S3: s3:PutObject)",
    Operation.CREATE_ONCE: "two processes can create the same object, so this package cannot tell which of two saves "
    "to one path came first: use each path from one job at a time, and see docs/stores.md for what is not promised "
    "there",
    Operation.REPLACE: "no checkpoint can be overwritten: save each to a path of its own, or grant permission to "
    "overwrite objects (S3: s3:PutObject)",
    Operation.RANGE: "no load could read what is saved: grant permission to read objects (S3: s3:GetObject), or use a "
    "server that answers a request for a range with status 206",
    Operation.LIST: "grant permission to read the directory (r and x), or to list the bucket (S3: s3:ListBucket)",
    Operation.DELETE: "saves are committed, and all that they should remove stays: grant permission to delete (S3: "
    "s3:DeleteObject), give a bucket a lifecycle rule, or remove it by hand",
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
        """Whether the operation works."""
        return all(each.works for each in self.answers if each.operation is operation)

    @property
    def missing(self) -> Answer | None:
        """The first operation that every save needs, and that does not work; None if saves work."""
        return next((each for each in self.answers if each.needed and not each.works), None)


_known: dict[tuple[ObjectPath, object], Findings] = {}
"""By root and store."""
_MOST_KNOWN: Final = 64


def what_works_for(directory: ObjectPath) -> Findings:
    """As :func:`what_works`, of the root of the checkpoint ``directory``, which exists if it is one."""
    # The root may belong to others.
    return what_works(directory.parent, directory if directory.is_local else None)


def what_works(root: Location, within: ObjectPath | None = None) -> Findings:
    """What storage at ``root``, an existing directory or a prefix in a store, can do: tried once, and said once. It is
    tried ``within`` one of its directories, if given.

    Raises :class:`StorageError` if saves cannot work there, or storage fails. Any thread.
    """
    place = stored(root)
    if (found := _known.get((place, place.store))) is None:
        found = examine(within or place)
        if (missing := found.missing) is not None:  # not remembered: it may be granted
            raise StorageError(errno.EOPNOTSUPP, _said(missing), str(root))
        for each in found.answers:
            if not each.works:
                logger.warning("%s: %s", root, _said(each))
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[place, place.store] = found
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
    with operations.during(operations.SELF_TEST), explained("trying what storage can do", root):
        if place.is_local:  # a name that no listing shows, and that goes with the directory
            folder = place / f".{name}~"
            local_store.make_folder(folder.key, operations.SELF_TEST)
        else:
            folder = place / INDEX_NAME / name
        causes = _causes(folder)
    answers = tuple(
        Answer(each, cause is None, cause or "", _MEANS[each] if cause else "", each in _NEEDED)
        for each, cause in causes.items()
    )
    return Findings(root, answers, time.monotonic() - began)


# ---- trials --------------------------------------------------------------------------------------

_RACING: Final = 4
"""Creations of one object at the same time."""

_REFUSALS: Final = {
    *(errno.EACCES, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL),
    *(errno.EEXIST, errno.ENOTEMPTY, errno.EXDEV, errno.EMLINK),
}
"""By these, storage says what it does not carry out. By others it fails, and what it can do is unknown."""


def _causes(folder: ObjectPath) -> dict[Operation, str | None]:
    """By operation why it does not work in ``folder``; None: it does. Eleven requests."""
    store, key = folder.store, (folder / "b").key
    content = b"brother" * 20  # longer than what a full file system still takes (local_store.py)

    def read() -> str | None:
        found = bytes(store.get_range(key, 2, 5))
        return None if found == b"oth" else f"{found!r} came, and not b'oth'"

    def listed() -> str | None:
        found = {each.key for each in store.list(folder.key).objects}
        return None if key in found else "what was stored is not in the list"

    trials: dict[Operation, Callable[[], str | None]] = {
        Operation.PUT: lambda: store.put(key, content),
        Operation.CREATE_ONCE: lambda: _create_once(folder),
        Operation.REPLACE: lambda: store.put(key, b"another"),
        Operation.RANGE: read,
        Operation.LIST: listed,
    }
    causes = {}
    try:
        for operation, trial in trials.items():
            causes[operation] = _cause(trial)
            if causes[Operation.PUT] is not None:
                break
    finally:
        causes[Operation.DELETE] = _cause(lambda: _delete(folder))
    return causes


def _cause(trial: Callable[[], str | None]) -> str | None:
    """What ``trial`` returns: why storage does not carry out an operation; or its error, in words. Raises what says
    nothing about that.
    """
    step()
    try:
        return trial()
    except ObjectMissingError:
        return "what was stored a moment ago is not found"
    except (BusyError, ExpiredError):
        raise
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return str(error.strerror)


def _create_once(folder: ObjectPath) -> str | None:
    """Create one object several times: some stores ignore the condition, or check it before they store the object."""
    store, key = folder.store, (folder / "a").key
    racing = 1 if folder.is_local else _RACING  # the system's calls are atomic where they work
    together = threading.Barrier(racing)

    def create(number: int) -> bool:
        with operations.during(operations.SELF_TEST):  # in this thread, too
            together.wait()
            return store.put_if_absent(key, b"%d" % number)

    with ThreadPoolExecutor(racing, "dcp_datastates-self-test") as executor:
        try:
            creations = [executor.submit(create, number) for number in range(racing)]
        except RuntimeError as error:
            together.abort()
            raise StorageError(
                errno.EAGAIN, f"the system starts no more threads ({error})", str(folder)
            ) from error
    failures = [failure for each in creations if (failure := each.exception()) is not None]
    winners = [each.exception() or each.result() for each in creations].count(True)
    if winners > 1:
        return f"{winners} of {racing} creations at the same time succeeded"
    if failures and not winners:
        raise failures[0]
    # None may have won, by its own account: if the reply to the winner's request was lost.
    if not store.get(key):
        return "the object is empty"
    return "a later creation of it succeeded, too" if store.put_if_absent(key, b"") else None


def _delete(folder: ObjectPath) -> str | None:
    """An error that does not tell of a permission is no answer: later deletions may work, and no save fails for it."""
    try:
        folder.store.delete([(folder / name).key for name in "ab"])
        if folder.folder is not None:
            operations.remove_directory(folder.folder)
    except (BusyError, ExpiredError):
        raise
    except StorageError as error:
        if error.errno != errno.EIO:
            raise
        logger.warning("what the self-test has stored stays there, such as %s: %s", folder, error)
    return None
