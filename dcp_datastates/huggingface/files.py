"""The small files that a library writes for one checkpoint on one rank, as values of the checkpoint; and back.

The library's own code writes them to a temporary directory, and reads them from one. So a checkpoint of this package
holds what a release of the library saves, whatever that is, and is committed with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from dcp_datastates.errors import CheckpointCorruptError

__all__ = ["read_files", "write_files"]


def read_files(folder: Path) -> dict[str, bytes]:
    """The contents of the files in ``folder`` and below, by their relative paths."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write what :func:`read_files` gave to another folder.

    Raises :class:`CheckpointCorruptError`, before anything is written, if a name leads out of ``folder``.
    """
    for path in [_inside(folder, name) for name in files]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[path.relative_to(folder).as_posix()])


def _inside(folder: Path, name: str) -> Path:
    path = PurePosixPath(name)
    is_plain = path.parts and path.as_posix() == name and "\0" not in name
    if (
        not is_plain
        or path.is_absolute()
        or (folder / path).resolve() != folder.resolve() / path  # by .., or by a symbolic link
    ):
        raise CheckpointCorruptError(
            f"the checkpoint names a file {name!r}, which is no relative path, or leads out of {str(folder)!r}; it is "
            f"not written"
        )
    return folder / path
