"""The small files that a library writes for one checkpoint on one rank, as values of the checkpoint; and back.

The library's own code writes them to a temporary directory, and reads them from one. So a checkpoint of this package
holds what a release of the library saves, whatever that is, and is committed with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["read_files", "write_files"]


def read_files(folder: Path) -> dict[str, bytes]:
    """The contents of the files in ``folder`` and below, by their relative paths."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write what :func:`read_files` gave to another folder."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
