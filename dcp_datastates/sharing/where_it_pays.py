"""Where it pays that ranks share their reads: where storage is slower than the network between the ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from dcp_datastates.storage.object_path import Location, ObjectPath

_IN_MEMORY: Final = ("ram://", "memory://")

_NETWORK: Final = frozenset(
    [
        "nfs",
        "nfs4",
        "lustre",
        "cifs",
        "smb",
        "smb3",
        "gpfs",
        "ceph",
        "beegfs",
        "afs",
        "pvfs2",
        "panfs",
        "wekafs",
        "fuse",
    ]
)
"""Types of file systems whose files lie on other machines; ``fuse``: so do most of those in user space."""

_MOUNTS: Final = Path("/proc/self/mountinfo")


def pays(place: Location, mounts: Path = _MOUNTS) -> bool:
    """Whether the place is in an object store, or in a network file system, by the type of its mount in ``mounts``.

    The memory of the job's nodes (``ram://``) is no slower than the other ranks. On a local disk, passing bytes on was
    measured to be slower than reading them again from the page cache.
    """
    if isinstance(place, ObjectPath):
        return not place.root.startswith(_IN_MEMORY)
    kind = _file_system(place, mounts)
    return kind in _NETWORK or kind.startswith("fuse.")


def _file_system(path: Path, mounts: Path) -> str:
    """The type of the file system with ``path``; empty if it is not known."""
    try:
        number = os.stat(path).st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        for line in mounts.read_text(errors="replace").splitlines():
            fields, _, kind = line.partition(" - ")
            if fields.split()[2] == device:
                return kind.split()[0]
    except (OSError, IndexError):
        pass
    return ""
