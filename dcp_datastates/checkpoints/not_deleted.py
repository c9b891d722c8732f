"""The error that says why a checkpoint was not deleted."""

from __future__ import annotations

import errno

from dcp_datastates.errors import StorageError
from dcp_datastates.storage.object_path import Location

__all__ = ["NotDeleted"]


class NotDeleted(StorageError):
    """The checkpoint was not changed; ``strerror`` says why, ``errno`` is EBUSY."""

    def __init__(self, path: Location, reason: str) -> None:
        super().__init__(errno.EBUSY, reason, str(path))
