"""Pins: names under which a checkpoint is kept from deletion. Each is an empty file in the checkpoint's directory."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final

from dcp_datastates.checkpoints.listing import is_committed
from dcp_datastates.errors import CheckpointNotFoundError, ConfigurationError
from dcp_datastates.io.committed import open_committed
from dcp_datastates.storage import attempts, local, lock, operations

__all__ = ["pin", "pins", "unpin"]

_PREFIX: Final = "pin."
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_PHASE: Final = "pin"
_LOCK_SECONDS: Final = 10.0


def pin(path: str | os.PathLike[str], name: str = "keep") -> None:
    """Keep the checkpoint at ``path`` from being deleted, by :func:`retain` and :func:`delete`, until :func:`unpin`.

    The pin is durable when this returns. A checkpoint may have several pins, for several purposes: ``"eval"``, say.
    Only one process calls this, not every rank. Repeated calls are safe.

    Raises:
        CheckpointNotFoundError: no checkpoint is committed there.
        ConfigurationError: ``name`` is no plain name.
        StorageError: the directory cannot be written.
    """
    file = _file(path, name)
    directory = file.parent
    if not is_committed(directory):
        open_committed(directory)  # raises, and says what is there instead
    with local.explained("pinning the checkpoint", directory):
        try:
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
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"{str(directory)!r} was deleted a moment ago") from error


def unpin(path: str | os.PathLike[str], name: str = "keep") -> None:
    """Remove the pin ``name`` of the checkpoint at ``path``, if it has it. Only one process calls this.

    Raises :class:`ConfigurationError` if ``name`` is no plain name, :class:`StorageError` if the system refuses.
    """
    file = _file(path, name)
    with local.explained("unpinning the checkpoint", file):
        file.unlink(missing_ok=True)


def pins(path: Path) -> tuple[str, ...]:
    """The names of the pins of the checkpoint at ``path``, in order. Raises :class:`StorageError`."""
    with local.explained("looking for pins", path):
        try:
            names = os.listdir(path)
        except (FileNotFoundError, NotADirectoryError):
            return ()
    return tuple(sorted(name[len(_PREFIX) :] for name in names if name.startswith(_PREFIX)))


def _file(path: str | os.PathLike[str], name: str) -> Path:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"the pin's name {name!r} must consist of letters, digits, '.', '_' and '-', such as \"eval\""
        )
    return local.local_path(path) / f"{_PREFIX}{name}"
