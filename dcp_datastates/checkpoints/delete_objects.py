"""Deletes one checkpoint in an object store.

A deletion replaces the decision to commit by one that says that the attempt is deleted: one request, from which on the
checkpoint is not loaded. A late duplicate of the request that committed it has no effect, since the object exists. The
other objects follow, and that decision goes last. The decision to withdraw an attempt stays: it fences a coordinator
that is late.

A pin and a deletion each write an object, and then look for the other's (``pins.py``): at least one of them sees the
other, and gives way.
"""

from __future__ import annotations

from dcp_datastates.checkpoints.listing import Found
from dcp_datastates.checkpoints.not_deleted import NotDeleted
from dcp_datastates.checkpoints.pins import DELETING, pins
from dcp_datastates.storage import local, store_attempts, store_index
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.decisions import State, decision_path, mark_deleted, withdraw
from dcp_datastates.storage.object_path import ObjectPath
from dcp_datastates.storage.store_attempts import Contents, delete_objects

__all__ = ["delete_committed", "delete_rest"]


def delete_committed(path: ObjectPath, victim: Found, dry_run: bool) -> None:
    """See :func:`checkpoints.delete.delete_committed`."""
    _check(path, victim)
    if dry_run:
        return
    marker = path / victim.attempt.name / DELETING
    marker.store.delete([marker.key])  # who may not delete learns it before anything has changed
    marker.store.put(marker.key, b"")
    try:
        there = _check(path, victim)
    except BaseException:
        marker.store.delete([marker.key])
        raise
    # The victim last: until then it is the newest that is committed, and no older one takes its place.
    states = {attempt: withdraw(path, attempt) for attempt in sorted(there)}
    for attempt, state in states.items():
        if state is State.COMMITTED:
            mark_deleted(path, attempt)
    _remove(path, there, states)


def delete_rest(path: ObjectPath, dry_run: bool) -> bool:
    """See :func:`checkpoints.delete.delete_rest`. Saves there that are only slow fail: they are withdrawn first."""
    if store_attempts.newest_committed(path) is not None:
        raise NotDeleted(path, "it was committed a moment ago")
    there = store_attempts.survey(path)
    if dry_run:
        return True
    states = {attempt: withdraw(path, attempt) for attempt in there}
    if State.COMMITTED in states.values():
        raise NotDeleted(path, "it was committed a moment ago")
    path.store.delete([(path / attempt.archive_pin).key for attempt in there])  # of killed saves
    return _remove(path, there, states)


def _check(path: ObjectPath, victim: Found) -> dict[Attempt, Contents]:
    """Raise :class:`NotDeleted` if the checkpoint is pinned, or was replaced, or a save may be in flight; returns all
    that is there.
    """
    if pinned := pins(path):
        raise NotDeleted(path, f"it is pinned ({', '.join(pinned)}); dcp_datastates.unpin first")
    found = store_attempts.newest_committed(path)
    if found is None or found[0] != victim.attempt:
        raise NotDeleted(path, "it was deleted or replaced meanwhile")
    there = store_attempts.survey(path)
    for attempt, contents in there.items():
        if attempt > victim.attempt and contents.decision is None:
            raise NotDeleted(
                path,
                f"a save may be in flight there, attempt {attempt.name}: wait until it ends; if no job saves there, "
                f"commit one more save, or delete the objects below {path / attempt.name}",
            )
    return there


def _remove(path: ObjectPath, there: dict[Attempt, Contents], states: dict[Attempt, State]) -> bool:
    """Remove the attempts, none of which can be loaded; returns whether nothing of them is left."""
    path.store.delete([(path / local.METADATA_NAME).key])
    delete_objects(path, [each for contents in there.values() for each in contents.data])
    path.store.delete([(path / attempt.name / DELETING).key for attempt in there])
    store_index.forget(path, there)
    decided = [attempt for attempt in there if states[attempt] is not State.WITHDRAWN]
    path.store.delete([decision_path(path, attempt).key for attempt in decided])
    return len(decided) == len(there)
