"""Deletes one checkpoint, in an order such that a crash leaves none that loads wrongly.

A deletion replaces the decision to commit by one that says that the attempt is deleted: one request, from which on the
checkpoint is not loaded. A late duplicate of the request that committed it has no effect, since the object exists. The
other objects follow, and that decision goes last. In an object store, the decision to withdraw an attempt stays: it
fences a coordinator that is late. In a file system, the attempt's folder goes, and nothing can be created in it.

A pin and a deletion each write an object, and then look for the other's (``pins.py``): at least one of them sees the
other, and gives way.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from dcp_datastates.checkpoints.inventory import has_rest, is_link
from dcp_datastates.checkpoints.listing import Found, open_found
from dcp_datastates.checkpoints.pins import pins
from dcp_datastates.errors import ConfigurationError, StorageError
from dcp_datastates.io.committed import open_committed
from dcp_datastates.process.forks import public
from dcp_datastates.storage import attempts, local, local_store, operations
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.attempts import Contents
from dcp_datastates.storage.decisions import State, withdraw
from dcp_datastates.storage.object_path import AnyPath, Location, ObjectPath, locate, stored
from dcp_datastates.storage.object_store import NotStoredError

logger = logging.getLogger(__name__)


class NotDeleted(StorageError):
    """The checkpoint was not changed; ``strerror`` says why, ``errno`` is EBUSY."""

    def __init__(self, path: Location | ObjectPath, reason: str) -> None:
        super().__init__(errno.EBUSY, reason, str(path))


@public("delete()")
def delete(path: AnyPath, *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Delete the checkpoint at ``path``, committed or abandoned, or the rest of an interrupted deletion.

    Once the first step is durable, the checkpoint can no longer be loaded; a crash after it leaves files that another
    call removes. Files that this package did not write stay, and so does their directory (logged). Only one process
    calls this, not every rank.

    An abandoned save is withdrawn first: if it is only slow, it fails.

    Args:
        path: Directory of the checkpoint, or its URL.
        storage_options: fsspec's options for a URL.

    Raises:
        CheckpointNotFoundError: no checkpoint of this package is there (:class:`ForeignCheckpointError`: another
            program's is); the message says what is there instead.
        ConfigurationError: ``path`` is a symbolic link.
        StorageError: the checkpoint is pinned; a save to the path is in flight, or may be; the metadata cannot be read,
            or have a version that this release does not know; or the system refused to delete a file or directory.
    """
    directory = locate(path, options=storage_options)
    if is_link(directory):
        raise ConfigurationError(
            f"path {str(directory)!r} is a symbolic link to {os.readlink(str(directory))!r}: delete what it points to, "
            f"then the link"
        )
    found = open_found(directory)
    if found is not None:
        delete_committed(found)
    elif (attempts.present(directory) or has_rest(directory)) and not attempts.is_taken(directory):
        delete_rest(directory)
    else:
        open_committed(directory)  # raises, and says what is there instead
        raise NotDeleted(directory, "it was committed a moment ago")


def delete_committed(
    victim: Found,
    *,
    dry_run: bool = False,
    whole: bool = False,
    is_abandoned: Callable[[Attempt], bool] = lambda attempt: False,
) -> None:
    """Delete a committed checkpoint, even with damaged metadata. ``dry_run``: only check whether it may be deleted.
    ``whole``: other files in its directory, too (in a file system). ``is_abandoned`` tells of an undecided attempt that
    is newer whether it may be withdrawn: if not, a save may be in flight, and nothing is deleted.

    Raises :class:`NotDeleted`, or :class:`StorageError` if the system refused, or the place cannot be judged.
    """
    path = stored(victim.path)
    if victim.error is not None:
        raise victim.error
    if victim.committed is None and not victim.is_damaged:
        raise NotDeleted(path, str(victim.problem))
    _check(path, victim, is_abandoned)
    if dry_run:
        return
    with operations.during("delete", path.folder):
        marker = path / victim.attempt.name / attempts.DELETING
        store = marker.store
        store.delete([marker.key])  # who may not delete learns it before anything has changed
        try:
            store.put(marker.key, b"")
        except NotStoredError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # then no pin can be made, either
                raise
        try:
            there = _check(path, victim, is_abandoned)
        except BaseException:
            store.delete([marker.key])
            raise
        _remove(path, there, {attempt: withdraw(path, attempt) for attempt in sorted(there)}, whole)


def delete_rest(path: Location, *, dry_run: bool = False, whole: bool = False) -> bool:
    """Delete the attempts at a path without a committed checkpoint; returns whether nothing is left there. Saves there
    that are only slow fail: they are withdrawn first. Raises as :func:`delete_committed`.
    """
    place = stored(path)
    if attempts.is_taken(place):
        raise NotDeleted(place, "it was committed a moment ago")
    there = attempts.survey(place)
    if dry_run:
        return True
    with operations.during("delete", place.folder):
        states = {attempt: withdraw(place, attempt) for attempt in there}
        if State.COMMITTED in states.values():
            raise NotDeleted(place, "it was committed a moment ago")
        pins_of_killed = [(place / attempt.archive_pin).key for attempt in there]
        place.store.delete(pins_of_killed)
        return _remove(place, there, states, whole)


def _check(
    path: ObjectPath, victim: Found, is_abandoned: Callable[[Attempt], bool]
) -> dict[Attempt, Contents]:
    """What is there. Raises :class:`NotDeleted` if it is pinned, or was replaced, or a save may be in flight."""
    if pinned := pins(path):
        raise NotDeleted(path, f"it is pinned ({', '.join(pinned)}); dcp_datastates.unpin first")
    if attempts.committed_attempt(path) != victim.attempt:
        raise NotDeleted(path, "it was deleted or replaced meanwhile")
    there = attempts.survey(path)
    for attempt, contents in there.items():
        newer = attempt > victim.attempt and contents.decision is None
        if newer and not is_abandoned(attempt):
            raise NotDeleted(
                path,
                f"a save may be in flight there, attempt {attempt.name}: wait until it ends; if no job saves there, "
                f"commit one more save, or remove {path / attempt.name} with all that is in it",
            )
    return there


def _remove(
    path: ObjectPath, there: dict[Attempt, Contents], states: dict[Attempt, State], whole: bool
) -> bool:
    """Remove the attempts, all of which are decided; returns whether nothing of them is left."""
    # Another program may have saved over it. Without files of its own, the metadata are damaged ones of this package.
    names = [each.name for each in path.store.list(path.key).objects]
    has_others = not all(name.startswith((".", "pin.")) for name in names)
    is_theirs = has_others and attempts.has_foreign_metadata(path)
    shown = [] if is_theirs else [(path / local.METADATA_NAME).key]
    nothing_stays = attempts.remove(path, there, states, shown)
    if not path.is_local:
        return nothing_stays
    if local_store.remove_folder(path.key, whole):
        return True
    names = path.store.list(path.key).names
    logger.warning(
        "%s is deleted, but not its directory: it holds %s", path, ", ".join(map(repr, names[:3]))
    )
    return False
