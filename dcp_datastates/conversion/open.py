"""Opens a source of any format, recognized by its content."""

from __future__ import annotations

import os
from pathlib import Path

from dcp_datastates.checkpoints.formats import Format, format_of
from dcp_datastates.checkpoints.inventory import is_directory, names_at
from dcp_datastates.checkpoints.listing import committed_among, directories
from dcp_datastates.conversion.datastates import DataStatesSource
from dcp_datastates.conversion.files import read_whole
from dcp_datastates.conversion.safetensors_files import (
    SafetensorsSource,
    is_safetensors,
    weights_in,
)
from dcp_datastates.conversion.source import Source
from dcp_datastates.conversion.stock import StockSource
from dcp_datastates.conversion.torch_file import TorchSource, is_torch_file
from dcp_datastates.errors import CheckpointNotFoundError, ForeignCheckpointError
from dcp_datastates.storage import presence
from dcp_datastates.storage.object_path import Location, ObjectPath, locate


def open_source(path: str | os.PathLike[str] | ObjectPath, allow_objects: bool = False) -> Source:
    """Open what is at ``path``: a checkpoint of this package or of stock DCP, a Hugging Face folder, a safetensors
    file or a file of ``torch.save``.

    Reads names, shapes and dtypes, not the tensors' bytes. Runs no code from the checkpoint, unless ``allow_objects``.

    Raises:
        CheckpointNotFoundError: there is none of these; the message says what is there.
        CheckpointCorruptError, StorageError: it cannot be read.
        UnsafeObjectError: it cannot be read without running code from it.
        IncompatibleStateError, UnsupportedTensorError: it has values that cannot be converted.
        ConfigurationError: it is not clear what is meant.
    """
    found = locate(path)
    if is_directory(found):
        return _open_directory(found, allow_objects)
    if isinstance(found, Path) and presence.is_there(found) and not presence.is_file(found):
        raise ForeignCheckpointError(f"{str(found)!r} is neither a file nor a directory")
    try:
        first = read_whole(found, 9)
    except ForeignCheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"there is nothing at {str(found)!r}") from None
    if is_torch_file(first):
        return TorchSource(found, allow_objects)
    if is_safetensors(first):
        return SafetensorsSource(found, [found], None)
    raise ForeignCheckpointError(
        f"{str(found)!r} is neither a safetensors file nor a file of torch.save"
    )


def _open_directory(path: Location, allow_objects: bool) -> Source:
    found = format_of(path)
    if found is Format.DATASTATES:
        return DataStatesSource(path)
    if found in (Format.STOCK, Format.UNKNOWN):
        return StockSource(path, allow_objects)
    weights = weights_in(path)
    if weights is not None:
        return weights
    below = committed_among(directories(path))
    others = sorted(names_at(path))
    there = (
        f"there are checkpoints below it, such as {below[-1].name!r}; pass the path of one"
        if below
        else f"the directory holds {len(others)} other entries, such as {others[0]!r}"
        if others
        else "the directory is empty"
    )
    raise CheckpointNotFoundError(f"no checkpoint of a known format at {str(path)!r}: {there}")
