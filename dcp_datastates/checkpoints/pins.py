"""Pins: names under which a checkpoint is kept from deletion. Each is an empty file in the checkpoint's directory."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from typing import Any, Final

from dcp_datastates.checkpoints.inventory import names_at
from dcp_datastates.errors import CheckpointNotFoundError, ConfigurationError, StorageError
from dcp_datastates.io.committed import open_committed
from dcp_datastates.process.forks import public
from dcp_datastates.storage import attempts
from dcp_datastates.storage.attempts import DELETING
from dcp_datastates.storage.object_path import AnyPath, Location, ObjectPath, locate, stored
from dcp_datastates.storage.object_store import ObjectMissingError

_PREFIX: Final = "pin."
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@public("pin()")
def pin(
    path: AnyPath, name: str = "keep", *, storage_options: Mapping[str, Any] | None = None
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
    if not attempts.is_taken(file.parent):
        open_committed(file.parent)  # raises, and says what is there instead
    directory = file.parent
    gone = CheckpointNotFoundError(f"{str(directory)!r} was deleted a moment ago")
    try:
        file.store.put(file.key, b"")
    except ObjectMissingError as error:
        raise gone from error
    # delete() writes its marker, and then looks for pins.
    found = attempts.committed_attempt(directory)
    if found is None and attempts.is_taken(directory):  # another program's
        return
    if found is not None and DELETING not in names_at(directory / found.name):
        return
    file.store.delete([file.key])
    if found is None:
        raise gone
    raise StorageError(
        errno.EBUSY,
        f"it is being deleted, or a deletion was interrupted; to keep it, remove {directory / found.name / DELETING}, "
        f"and pin again",
        str(directory),
    )


@public("unpin()")
def unpin(
    path: AnyPath, name: str = "keep", *, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Remove the pin ``name`` of the checkpoint at ``path``, if any. One process calls this. Raises as :func:`pin`."""
    file = _file(path, name, storage_options)
    file.store.delete([file.key])


def pins(path: Location) -> tuple[str, ...]:
    """The names of the pins of the checkpoint at ``path``, in order. Raises :class:`StorageError`."""
    names = names_at(path)
    return tuple(sorted(name[len(_PREFIX) :] for name in names if name.startswith(_PREFIX)))


def _file(path: AnyPath, name: str, options: Mapping[str, Any] | None) -> ObjectPath:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"the pin's name {name!r} must consist of letters, digits, '.', '_' and '-', such as \"eval\""
        )
    return stored(locate(path, options=options)) / f"{_PREFIX}{name}"
