"""The note that a job leaves beside its checkpoints, for people: the last save that failed.

Nothing relies on it, and no error of it reaches a save. It is a small JSON document in the root, replaced as a whole:
of several jobs, the last to fail counts. A reader trusts neither its size nor its content.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from dcp_datastates.errors import DataStatesError
from dcp_datastates.storage import operations
from dcp_datastates.storage.bounded import bounded, check_not_hung
from dcp_datastates.storage.object_path import Location, stored
from dcp_datastates.storage.object_store import NotStoredError, ObjectMissingError
from dcp_datastates.storage.store_calls import without_secrets

logger = logging.getLogger(__name__)

FAILURE_NAME: Final = ".datastates-failure"

_MOST_BYTES: Final = 16 << 10
_LONGEST: Final = 2000  # characters of a text
_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Note:
    """The last save in a root that failed. What is not known is None."""

    at: float | None = field(default_factory=time.time)
    """In seconds since the epoch, by the writer's clock."""
    by: str | None = field(
        default_factory=lambda: f"process {os.getpid()} on {socket.gethostname()}"
    )
    error: str | None = None
    """Of the save; or why the note cannot be read."""
    checkpoint: str | None = None
    """The name of the directory that the save was to."""
    attempt: str | None = None


def leave(root: Location, note: Note) -> None:
    """Leave the ``note`` in ``root``, without secrets. Waits for storage; never raises its errors.

    On a full file system, it has its time alone: so short an object takes no room there (:mod:`local_store`).
    """
    place, said = stored(root) / FAILURE_NAME, asdict(note)
    if note.error is not None:
        said["error"] = without_secrets(note.error)[:_LONGEST]

    def put() -> None:
        with operations.during("note"):
            try:
                place.store.put(place.key, _packed(said))
            except NotStoredError:
                place.store.put(place.key, _packed({"at": int(note.at or 0)}))

    try:
        check_not_hung(place)
        bounded("leaving a note", place, _SECONDS, put)
    except (DataStatesError, OSError) as error:
        logger.debug("no note is left: %s", error)


def _packed(said: Mapping[str, Any]) -> bytes:
    text = json.dumps(said, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace")


def note_in(root: Location) -> Note | None:
    """The note in ``root``; None if there is none. Never raises an error of storage."""
    place = stored(root) / FAILURE_NAME
    try:
        data = bytes(place.store.get_range(place.key, 0, _MOST_BYTES + 1))
        found = json.loads(data) if len(data) <= _MOST_BYTES else None
    except ObjectMissingError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        return Note(None, None, f"{place} cannot be read: {error}")
    if not isinstance(found, dict):
        return Note(None, None, f"{place} is no note of this package: remove it")
    at = found.get("at")
    texts = {each: found.get(each) for each in ("by", "error", "checkpoint", "attempt")}
    return Note(
        at if isinstance(at, int | float) and 0 <= at < 2**37 else None,
        **{
            each: text[:_LONGEST] if isinstance(text, str) else None for each, text in texts.items()
        },
    )
