"""Checks of a checkpoint's path, before anything is written there."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcp_datastates.commit.place import Place
from dcp_datastates.config import WriterConfig
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.storage import local, operations
from dcp_datastates.storage.bounded import bounded
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.object_path import (
    AnyPath,
    Location,
    ObjectPath,
    check_opens,
    check_prefix,
    is_url,
    locate,
)


def writable(
    path: str | os.PathLike[str] | ObjectPath,
    config: WriterConfig,
    alone: bool,
    below: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Location:
    """The place that ``path`` names; a relative path is below ``below`` (None: the present working directory).

    ``options`` are the user's ``storage_options``. Opens a store, and does not ask it.

    Raises :class:`ConfigurationError`. With several ranks, perhaps only some find more faults: :func:`check_path`
    reports these to all. A process ``alone`` finds them now.
    """
    location = locate(path, below, options)
    if isinstance(location, ObjectPath):
        check_prefix(location)
    elif alone:
        directory, timeout = location, config.commit_timeout
        bounded("looking at", directory, timeout, lambda: local.check_writable(directory))
    return location


def archive_root(archive: AnyPath | None, options: Mapping[str, Any] | None) -> Location | None:
    """The directory of archived checkpoints that a user names; ``options`` are the user's ``storage_options``.

    Raises :class:`ConfigurationError`. Opens a store, and does not ask it.
    """
    if archive is None:
        return None
    root = locate(archive, options=options if is_url(archive) else None)
    check_opens(root)
    return root


def check_at_call(location: Location | None, config: WriterConfig) -> None:
    """In the training thread: raise :class:`CheckpointExistsError` if the save may not replace what is there. Does not
    ask a store, over the network.
    """
    if isinstance(location, Path) and not config.overwrite:
        directory, timeout = location, config.commit_timeout
        bounded("looking at", directory, timeout, lambda: Place(directory).check_overwrite(False))


def check_path(save: SaveOperation) -> None:
    """Raise early if this rank cannot write there. The coordinator's claim tells whether the checkpoint may be written,
    and in a store, whether it can be: ranks that asked it, too, would only cost requests.
    """
    hit("plan.before")
    location = save.resolved_path()
    if isinstance(location, Path):
        directory = location
        save.on_storage("looking at the path", lambda: local.check_writable(directory))
    hit("plan.after")


def directories_to_sync(folder: Path, rank: int) -> list[str]:
    """The directories to sync for the entries of files in ``folder``. Raises :class:`ConfigurationError` unless this
    rank sees ``folder``, which the coordinator made.
    """
    # Create it again, which must fail because it exists. Creating asks the server of a network file system; a lookup
    # may use a cached "missing" for half a minute.
    made = local.make_directories(folder, "share")
    if not made:
        return [str(parent) for parent in local.sync_directories(folder)]
    for path in made:
        with contextlib.suppress(OSError):
            operations.remove_directory(path, "share")
    raise ConfigurationError(
        f"rank {rank} on {socket.gethostname()} does not see {str(folder)!r}, which the coordinator has just created: "
        f"the checkpoint's path must be one directory for all ranks, on a shared file system"
    )
