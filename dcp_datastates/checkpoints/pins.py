"""Pins: names under which a checkpoint is kept from deletion. Each is an empty file in the checkpoint's directory."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dcp_datastates.checkpoints.inventory import is_committed, names_at
from dcp_datastates.errors import CheckpointNotFoundError, ConfigurationError, StorageError
from dcp_datastates.io.committed import open_committed
from dcp_datastates.storage import attempts, local, lock, operations, store_attempts
from dcp_datastates.storage.object_path import Location, ObjectPath, locate

__all__ = ["DELETING", "pin", "pins", "unpin"]

DELETING: Final = "deleting"
"""In an object store: an object in the attempt's prefix while it is being deleted."""

_PREFIX: Final = "pin."
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_PHASE: Final = "pin"
_LOCK_SECONDS: Final = 10.0


def pin(
    path: str | os.PathLike[str] | ObjectPath,
    name: str = "keep",
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Keep the checkpoint at ``path`` from being deleted, by :func:`retain` and :func:`delete`, until :func:`unpin`.

    The pin is durable when this returns. A checkpoint may have several pins, for several purposes: ``"eval"``, say.
    Only one process calls this, not every rank. Repeated calls are safe.

    Args:
        path: Directory of the checkpoint, or its URL.
        name: Letters, digits, ``.``, ``_`` and ``-``.
        storage_options: fsspec's options for a URL.

    Raises:
        CheckpointNotFoundError: no checkpoint is committed there.
        ConfigurationError: ``name`` is no plain name.
        StorageError: the directory cannot be written.
    """
    file = _file(path, name, storage_options)
    if not is_committed(file.parent):
        open_committed(file.parent)  # raises, and says what is there instead
    with local.explained("pinning the checkpoint", file.parent):
        try:
            if isinstance(file, ObjectPath):
                _pin_object(file)
            else:
                _pin_file(file)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"{str(file.parent)!r} was deleted a moment ago"
            ) from error


def _pin_file(file: Path) -> None:
    directory = file.parent
    # delete() looks for pins under the same lock, and without locks after its claim.
    with lock.exclusive(directory, _LOCK_SECONDS):
        file.touch()
        operations.sync_directory(directory, _PHASE)
        for attempt in attempts.present(directory):
            if attempts.is_deletion(directory, attempt):
                attempts.withdraw(directory, attempt)
        if not is_committed(directory):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
            raise FileNotFoundError


def _pin_object(pin: ObjectPath) -> None:
    directory = pin.parent
    pin.store.put(pin.key, b"")
    # delete() writes its marker, and then looks for pins.
    found = store_attempts.newest_committed(directory)
    if found is not None:
        folder = directory / found[0].name
        if DELETING not in names_at(folder):
            return
    pin.store.delete([pin.key])
    if found is None:
        raise FileNotFoundError
    raise StorageError(
        errno.EBUSY,
        f"it is being deleted, or a deletion was interrupted; to keep it, remove {folder / DELETING}, and pin again",
        str(directory),
    )


def unpin(
    path: str | os.PathLike[str] | ObjectPath,
    name: str = "keep",
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Remove the pin ``name`` of the checkpoint at ``path``, if it has it. Only one process calls this.

    Raises :class:`ConfigurationError` if ``name`` is no plain name, :class:`StorageError` if the system refuses.
    """
    file = _file(path, name, storage_options)
    with local.explained("unpinning the checkpoint", file):
        if isinstance(file, ObjectPath):
            file.store.delete([file.key])
        else:
            file.unlink(missing_ok=True)


def pins(path: Location) -> tuple[str, ...]:
    """The names of the pins of the checkpoint at ``path``, in order. Raises :class:`StorageError`."""
    with local.explained("looking for pins", path):
        names = names_at(path)
    return tuple(sorted(name[len(_PREFIX) :] for name in names if name.startswith(_PREFIX)))


def _file(
    path: str | os.PathLike[str] | ObjectPath, name: str, options: Mapping[str, Any] | None
) -> Location:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"the pin's name {name!r} must consist of letters, digits, '.', '_' and '-', such as \"eval\""
        )
    return locate(path, options=options) / f"{_PREFIX}{name}"
