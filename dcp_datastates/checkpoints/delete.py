"""Deletes one checkpoint: in a file system (``delete_directory.py``), or in an object store (``delete_objects.py``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcp_datastates.checkpoints import delete_directory, delete_objects
from dcp_datastates.checkpoints.inventory import attempts_at, is_committed, is_link
from dcp_datastates.checkpoints.listing import Found, open_found
from dcp_datastates.checkpoints.not_deleted import NotDeleted
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.io.committed import open_committed
from dcp_datastates.storage.object_path import Location, ObjectPath, locate

__all__ = ["delete", "delete_committed", "delete_rest"]


def delete(
    path: str | os.PathLike[str] | ObjectPath, *, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Delete the checkpoint at ``path``, committed or abandoned, or the rest of an interrupted deletion.

    Once the first step is durable, the checkpoint can no longer be loaded; a crash after it leaves files that another
    call removes. Files that this package did not write stay, and so does their directory (logged). Only one process
    calls this, not every rank.

    In an object store, where no lock tells whether a save is in flight, an abandoned save is withdrawn first: if it is
    only slow, it fails.

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
    if isinstance(directory, Path) and is_link(directory):
        raise ConfigurationError(
            f"path {str(directory)!r} is a symbolic link to {os.readlink(directory)!r}: delete what it points to, "
            f"then the link"
        )
    found = open_found(directory)
    if found is not None:
        delete_committed(found)
    elif attempts_at(directory) and not is_committed(directory):
        delete_rest(directory)
    else:
        open_committed(directory)  # raises, and says what is there instead
        raise NotDeleted(directory, "it was committed a moment ago")


def delete_committed(victim: Found, *, dry_run: bool = False, whole: bool = False) -> None:
    """Delete a committed checkpoint, even with damaged metadata. ``dry_run``: only check whether it may be deleted.
    ``whole``: other files in its directory, too (in a file system).

    Raises :class:`NotDeleted`, or :class:`StorageError` if the system refused, or the place cannot be judged.
    """
    path = victim.path
    if victim.error is not None:
        raise victim.error
    if victim.committed is None and not victim.is_damaged:
        raise NotDeleted(path, str(victim.problem))
    if isinstance(path, ObjectPath):
        delete_objects.delete_committed(path, victim, dry_run)
    else:
        delete_directory.delete_committed(path, victim, dry_run, whole)


def delete_rest(path: Location, *, dry_run: bool = False, whole: bool = False) -> bool:
    """Delete the attempts at a path without a committed checkpoint; returns whether nothing is left there.

    Raises as :func:`delete_committed`.
    """
    if isinstance(path, ObjectPath):
        return delete_objects.delete_rest(path, dry_run)
    return delete_directory.delete_rest(path, dry_run, whole)
