"""The decision about an attempt: whether it is committed, withdrawn or deleted.

It is one object, ``<attempt>/decision``, which is created once. The store lets one creation succeed, so whether an
attempt was committed or withdrawn first has one answer for all processes, at all times: no lock is needed, and it does
not matter which process is late, or believed dead. The decision to commit *is* the checkpoint's metadata, so no state
exists in which an attempt is committed and its metadata are missing.

A creation whose reply is lost may have succeeded, may succeed later, and may be carried out twice. So a process that is
in doubt tries to withdraw the attempt. Then the object is there, and what it says is final.
"""

from __future__ import annotations

import errno
import logging
import secrets
from collections.abc import Callable
from enum import Enum
from typing import Final

from dcp_datastates.errors import CheckpointSupersededError, StorageError
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.object_path import Location, ObjectPath, stored
from dcp_datastates.storage.object_store import NotDurableError, NotStoredError, ObjectMissingError

DECISION_NAME: Final = "decision"

logger = logging.getLogger(__name__)

_WITHDRAWN: Final = b"withdrawn by "
_DELETED: Final = b"deleted by "

LONGEST_MARK: Final = 64
"""Bytes. A decision that is not to commit is no longer than this; metadata are longer."""

_TRIES: Final = 3
"""To withdraw an attempt, if the object comes and goes meanwhile. Retries of requests are the library's."""


class State(Enum):
    """What has been decided about an attempt."""

    COMMITTED = "committed"
    WITHDRAWN = "withdrawn"
    DELETED = "deleted"
    """It was committed, and is being deleted."""


def decision_path(directory: Location, attempt: Attempt) -> ObjectPath:
    """Where the decision about ``attempt`` at ``directory`` lies."""
    return stored(directory) / attempt.name / DECISION_NAME


def committed_metadata(directory: Location, attempt: Attempt) -> bytes | None:
    """The metadata of an attempt that is committed, else None. Raises :class:`StorageError`."""
    path = decision_path(directory, attempt)
    try:
        data = path.store.get(path.key)
    except ObjectMissingError:
        return None
    return data if _state(data) is State.COMMITTED else None


def state_of(directory: Location, attempt: Attempt) -> State | None:
    """What is decided about an attempt; None if nothing is yet. Does not read the metadata, which may be large. Raises
    :class:`StorageError`.
    """
    path = decision_path(directory, attempt)
    try:
        return _state(bytes(path.store.get_range(path.key, 0, LONGEST_MARK)))
    except ObjectMissingError:
        return None


def decide(
    directory: Location,
    attempt: Attempt,
    data: bytes,
    on_doubt: Callable[[OSError], object] = lambda error: None,
) -> State:
    """Commit the attempt with the metadata ``data``; returns what is decided about it, for good.

    Only the attempt's coordinator calls this, once. If the reply to its request is lost or leaves a doubt, it withdraws
    the attempt and reads which of the two came first; ``on_doubt`` is called with the error before.

    Raises :class:`CheckpointSupersededError` if another process has committed an attempt with this number, or has
    removed the attempt's folder; :class:`NotStoredError`: it is not committed, and not withdrawn; any other
    :class:`StorageError`: the attempt may be committed, or may come to be. :func:`withdraw` then decides.
    """
    path = decision_path(directory, attempt)
    try:
        hit("publish.decide.before")
        created = path.store.put_if_absent(path.key, data)
        hit("publish.decide.after")
    except (NotDurableError, NotStoredError):
        raise
    except ObjectMissingError as error:
        raise CheckpointSupersededError(
            f"the folder of attempt {attempt.name} at {str(directory)!r} is gone: another job saves to the same path, "
            f"or deletes there, or the other ranks have given this save up"
        ) from error
    except OSError as error:  # whatever the store did: what follows tells, or raises
        logger.warning("committing %s: %s", path, error)
        on_doubt(error)
    else:
        if created:
            return State.COMMITTED
    state = withdraw(directory, attempt)
    if state is State.COMMITTED:
        _check_same(directory, attempt, data)
    return state


def withdraw(directory: Location, attempt: Attempt) -> State:
    """Make sure that the attempt is decided, by withdrawing it if it is not; returns what is decided. Any process.

    Raises :class:`StorageError`: the attempt may or may not be decided.
    """
    path = decision_path(directory, attempt)
    failure: StorageError | None = None
    for _ in range(_TRIES):
        try:
            if path.store.put_if_absent(path.key, _mark(_WITHDRAWN)):
                return State.WITHDRAWN
        except (NotDurableError, ObjectMissingError) as error:
            if error.errno != errno.ENOENT:
                raise
            return State.WITHDRAWN  # the attempt's folder is gone, and no process makes it again
        except StorageError as error:
            failure = error
        state = state_of(directory, attempt)
        if state is not None:
            return state
        if failure is not None:
            raise failure
    raise StorageError(
        errno.EBUSY,
        "the store says that the object exists when it is created, and that it is missing when it is read",
        str(path),
    )


def decide_alone(
    directory: Location, attempt: Attempt, data: bytes, creates_once: bool = True
) -> State:
    """Commit an attempt that no process withdraws, with the metadata ``data``; returns what is decided about it: a copy
    of one that is committed elsewhere (any process, any number of times), or, without ``creates_once``, one in a store
    that lets two creations of an object succeed (:mod:`self_test`), where only one process may decide. Raises as
    :func:`decide`.
    """
    path = decision_path(directory, attempt)
    try:
        if creates_once:
            created = path.store.put_if_absent(path.key, data)
        elif created := state_of(directory, attempt) is None:
            path.store.put(path.key, data)
        if created:
            return State.COMMITTED
        failure: OSError = StorageError(errno.EBUSY, "it was deleted a moment ago", str(path))
    except NotDurableError:
        raise
    except OSError as error:  # the request may still be carried out
        failure = error
    if (state := state_of(directory, attempt)) is None:
        raise failure
    if state is State.COMMITTED:
        _check_same(directory, attempt, data)
    return state


def mark_deleted(directory: Location, attempt: Attempt) -> None:
    """Replace the decision to commit: from now on the attempt is not loaded, and a late duplicate of the request that
    committed it has no effect. The caller has seen it committed. Idempotent; raises :class:`StorageError`.
    """
    path = decision_path(directory, attempt)
    try:
        path.store.put(path.key, _mark(_DELETED))
    except ObjectMissingError:  # another process has deleted it, with its folder
        return


def _mark(kind: bytes) -> bytes:
    # The random number tells processes apart, for people who look.
    return kind + secrets.token_hex(16).encode() + b"\n"


def _state(data: bytes) -> State:
    if data.startswith(_WITHDRAWN):
        return State.WITHDRAWN
    return State.DELETED if data.startswith(_DELETED) else State.COMMITTED


def _check_same(directory: Location, attempt: Attempt, data: bytes) -> None:
    if committed_metadata(directory, attempt) not in (None, data):
        raise CheckpointSupersededError(
            f"another process has committed other metadata as {decision_path(directory, attempt)}: two jobs have drawn "
            f"the same attempt"
        )
