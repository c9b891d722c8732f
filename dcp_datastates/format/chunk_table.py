"""The tensors of a whole checkpoint and their chunks, in columns: what ``Metadata`` says in objects.

A job of a thousand ranks has a million chunks. As objects they take seconds to make, and seconds to pickle,
under the GIL; as arrays, nothing of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import TensorProperties

__all__ = ["Catalog", "FileRecord", "Ints", "Placement"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Catalog:
    """Names in order of ``Metadata.state_dict_metadata``; all arrays are C-contiguous int64.

    "Ragged" arrays have no padding: entry after entry, each with as many values as its tensor has dimensions.
    """

    names: tuple[str, ...]
    """F flattened FQNs, each once."""
    table: tuple[TensorProperties, ...]
    properties: Ints
    """(F,): index into ``table``; -1 for an object (``BytesStorageMetadata``)."""
    ndims: Ints
    """(F,): dimensions; 0 for an object."""
    shapes: Ints
    """Ragged, F entries: the whole tensors' sizes, in elements."""
    counts: Ints
    """(F,): chunks of each tensor; 0 for an object. Their sum is C."""
    offsets: Ints
    """Ragged, C entries: of each chunk in its tensor, in elements; chunks of one name follow one another."""
    sizes: Ints
    """Ragged, C entries, as ``offsets``."""
    mappings: Any
    """``Metadata.planner_data``. Of DCP's planners and ours: the path of each name in the state dict, a tuple of keys
    and list indices; None if it was not flattened.
    """

    def owners(self) -> Ints:
        """(C + O,): whose each row of a placement is, as an index into ``names``: all chunks, then all objects."""
        numbers = np.arange(len(self.names))
        return np.concatenate([np.repeat(numbers, self.counts), numbers[self.properties < 0]])


@dataclass(frozen=True)
class FileRecord:
    """One data file of a checkpoint: what a reader must know before opening it. Sizes in bytes."""

    relative_path: str
    nbytes: int
    table_offset: int


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the bytes of a :class:`Catalog`'s C chunks and O objects are: ``Metadata.storage_data`` in columns.

    Objects are the names with ``properties == -1``, in the order of ``names``. Offsets and lengths are in bytes.
    """

    paths: tuple[str, ...]
    """Relative paths of the data files."""
    chunk_files: Ints
    """(C,): index into ``paths``."""
    chunk_offsets: Ints
    chunk_lengths: Ints
    object_files: Ints
    """(O,)"""
    object_offsets: Ints
    object_lengths: Ints

    def rows(self) -> tuple[Ints, Ints, Ints]:
        """Files, offsets and lengths, each (C + O,): all chunks, then all objects."""
        return (
            np.concatenate([self.chunk_files, self.object_files]),
            np.concatenate([self.chunk_offsets, self.object_offsets]),
            np.concatenate([self.chunk_lengths, self.object_lengths]),
        )
