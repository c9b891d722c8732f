"""Tells the format of the checkpoint at a path."""

from __future__ import annotations

import enum
from typing import Final

from dcp_datastates.checkpoints.inventory import names_at
from dcp_datastates.checkpoints.listing import open_found
from dcp_datastates.errors import CheckpointNotFoundError, DataStatesError, ForeignCheckpointError
from dcp_datastates.io.committed import open_committed
from dcp_datastates.storage import attempts
from dcp_datastates.storage.object_path import AnyPath, locate

HUGGING_FACE_INDEX: Final = "model.safetensors.index.json"


class Format(enum.Enum):
    """The format of the checkpoint committed at a path."""

    DATASTATES = "dcp_datastates"
    STOCK = "stock DCP"
    HUGGING_FACE = "Hugging Face safetensors"
    UNKNOWN = "unknown"
    """There are metadata, but neither this package's nor readable as stock DCP's."""
    NONE = "none"


def format_of(path: AnyPath) -> Format:
    """The format of the checkpoint at ``path``, from its metadata, without running any code from them.

    Raises :class:`CheckpointNotFoundError` for an uncommitted save of this package, :class:`CheckpointCorruptError` if
    its metadata are damaged, and :class:`StorageError` if they cannot be read.
    """
    directory = locate(path)
    try:
        open_committed(directory)
    except ForeignCheckpointError:
        return Format.STOCK
    except CheckpointNotFoundError:
        if attempts.present(directory):
            raise
        return Format.HUGGING_FACE if HUGGING_FACE_INDEX in names_at(directory) else Format.NONE
    except DataStatesError:
        if open_found(directory) is not None:  # a checkpoint of this package
            raise
        return Format.UNKNOWN
    return Format.DATASTATES
