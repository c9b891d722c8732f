"""The small files that a library writes for one checkpoint on one rank, as values of the checkpoint; and back.

The library's own code writes them to a temporary directory, and reads them from one. So a checkpoint of this package
holds what a release of the library saves, whatever that is, and is committed with it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dcp_datastates.errors import CheckpointCorruptError
from dcp_datastates.storage import local, presence
from dcp_datastates.storage.attempt import Attempt

logger = logging.getLogger(__name__)

MOST_BYTES: Final = 64 << 20
"""So many bytes of files that callbacks have written beside a checkpoint become part of it."""


def read_files(folder: Path) -> dict[str, bytes]:
    """The contents of the files in ``folder`` and below, by their relative paths."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if presence.is_file(path)
    }


def read_others(directory: Path) -> dict[str, bytes]:
    """As :func:`read_files`, of the files and folders that other programs have put into a checkpoint's directory.

    If these have more than :data:`MOST_BYTES` together, they are not read: they stay beside the checkpoint.
    """
    files = [
        path
        for path in sorted(directory.rglob("*"))
        if not _is_ours(path.relative_to(directory).parts[0]) and presence.is_file(path)
    ]
    size = sum(path.stat().st_size for path in files)
    if size > MOST_BYTES:
        logger.warning(
            "%s has %d files of callbacks with %d bytes: these stay there, but are no part of the checkpoint's commit",
            directory,
            len(files),
            size,
        )
        return {}
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def _is_ours(name: str) -> bool:
    return name == local.METADATA_NAME or Attempt.parse(name.removeprefix(".")) is not None


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write what :func:`read_files` gave to another folder.

    Raises :class:`CheckpointCorruptError`, before anything is written, if a name leads out of ``folder``.
    """
    for path in [_inside(folder, name) for name in files]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[path.relative_to(folder).as_posix()])


def _inside(folder: Path, name: str) -> Path:
    if (
        "\0" in name
        or not {"", ".", ".."}.isdisjoint(name.split("/"))  # an absolute path begins with ""
        or (folder / name).resolve() != folder.resolve() / name  # by a symbolic link
    ):
        raise CheckpointCorruptError(
            f"the checkpoint names a file {name!r}, which is no relative path, or leads out of {str(folder)!r}; it is "
            f"not written"
        )
    return folder / name
