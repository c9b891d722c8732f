"""Finds the metadata of the checkpoint at a prefix of an object store; if there is none, says what is there instead."""

from __future__ import annotations

import errno
from typing import Final

from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ForeignCheckpointError,
    StorageError,
)
from dcp_datastates.format.metadata import decode
from dcp_datastates.io.foreign import is_stock, kind_of_file, kind_of_folder
from dcp_datastates.storage import decisions, presence, store_attempts, store_index
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.decisions import State
from dcp_datastates.storage.local import METADATA_NAME
from dcp_datastates.storage.object_path import ObjectPath
from dcp_datastates.storage.object_store import Listing, ObjectMissingError

__all__ = ["read"]

_COPIES: Final = "dcp-datastates copy, from where the checkpoint was, makes it one here"


def read(directory: ObjectPath) -> tuple[ObjectPath, bytes, float]:
    """Where the metadata of the checkpoint at ``directory`` lie, their bytes, and the time of the commit by the store's
    clock, in seconds since the epoch. One LIST and one GET in the usual case.

    Raises :class:`CheckpointNotFoundError` (:class:`ForeignCheckpointError` for one of stock DCP) and
    :class:`StorageError`.
    """
    found = store_attempts.newest_committed(directory)
    if found is None:
        listing = directory.store.list(directory.key)
        if not (listing.folders or listing.objects):
            presence.check_answers(directory.store, directory.key)
        _refuse_stock(directory, listing)
        raise CheckpointNotFoundError(
            f"no committed checkpoint at {str(directory)!r}: {_what_is_there(directory, listing)}"
        )
    attempt, decision = found
    return decisions.decision_path(directory, attempt), decision.data, decision.decided_at


def _refuse_stock(directory: ObjectPath, listing: Listing) -> None:
    data = _metadata_object(directory, listing)
    if data is not None and is_stock(data):
        raise ForeignCheckpointError(
            f"{str(directory)!r} holds a stock DCP checkpoint, not one of dcp_datastates; it has no checksums; "
            f"torch's FsspecReader loads it, and dcp_datastates.convert converts it"
        )


def _what_is_there(directory: ObjectPath, listing: Listing) -> str:
    attempts = store_attempts.attempts_in(listing.folders)
    states = {attempt: decisions.state_of(directory, attempt) for attempt in attempts}
    if (copied := _attempt_of(directory, listing)) is not None and states.get(copied) is None:
        return (
            "it has .metadata, but no decision of this store that they are committed, so another tool has copied it "
            f"there, perhaps not all of it; {_COPIES}"
        )
    if attempts:
        return _uncommitted(attempts[-1], states[attempts[-1]])
    if store_index.INDEX_NAME in listing.folders and (entries := store_index.entries(directory)):
        return f"but there are checkpoints below it, such as {entries[0].name!r}"
    names = [*listing.folders, *(each.key.rpartition("/")[2] for each in listing.objects)]
    if not names:
        return _of_the_key_itself(directory)
    if (what := kind_of_folder(names)) is not None:
        return f"it is {what}"
    return f"there are {len(names)} other objects and prefixes, such as {names[0]!r}"


def _uncommitted(attempt: Attempt, state: State | None) -> str:
    match state:
        case State.DELETED:
            return "it was deleted, and not all of it is gone yet: dcp_datastates.delete removes the rest"
        case State.WITHDRAWN:
            return f"a save failed, and its attempt {attempt.name} cannot be committed any more"
        case _:
            return f"a save was begun and not committed ({attempt.name}); it is still running, or failed"


def _of_the_key_itself(directory: ObjectPath) -> str:
    if directory.key:
        try:
            directory.store.size(directory.key)
            return f"it is {kind_of_file(directory.suffix)}"
        except ObjectMissingError:
            pass
        except StorageError as error:
            if error.errno != errno.EACCES:  # of a policy that grants the list of one prefix alone
                raise
    return "there is nothing"


def _metadata_object(directory: ObjectPath, listing: Listing) -> bytes | None:
    path = directory / METADATA_NAME
    if all(each.key != path.key for each in listing.objects):
        return None
    try:
        return path.store.get(path.key)[0]
    except ObjectMissingError:
        return None


def _attempt_of(directory: ObjectPath, listing: Listing) -> Attempt | None:
    """The attempt that ``.metadata`` names: a copy of a decision, which nobody trusts here."""
    data = _metadata_object(directory, listing)
    try:
        return None if data is None else decode(data, directory / METADATA_NAME).note.attempt
    except CheckpointCorruptError:
        return None
