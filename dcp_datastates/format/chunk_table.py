"""The tensors of a whole checkpoint and their chunks, in columns: the contents of ``Metadata`` without its objects.

A job of a thousand ranks has a million chunks. As objects, they take seconds to make, and seconds to pickle, under the
GIL; arrays avoid both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import TensorProperties

__all__ = ["STORED", "Catalog", "FileRecord", "Ints", "Placement", "narrowed"]

Ints = npt.NDArray[np.int64]

STORED: Final[Mapping[int, np.dtype[Any]]] = {
    width: np.dtype(f"<{kind}{width}") for width, kind in ((1, "u"), (2, "u"), (4, "u"), (8, "i"))
}
"""The types of stored columns, by the bytes of a value."""


def narrowed(values: Ints) -> npt.NDArray[Any]:
    """The same values, in the narrowest of the types :data:`STORED`."""
    most = int(values.max(initial=0)) if values.min(initial=0) >= 0 else 1 << 62
    return values.astype(STORED[next((width for width in (1, 2, 4) if most < 1 << 8 * width), 8)])


@dataclass(frozen=True, eq=False)
class Catalog:
    """The chunk table: names in order of ``Metadata.state_dict_metadata``. All arrays are C-contiguous int64.

    "Ragged" arrays contain the entries one after another, without padding; an entry has one value per dimension of its
    tensor.
    """

    names: tuple[str, ...]
    """F flattened FQNs, each once."""
    table: tuple[TensorProperties, ...]
    properties: Ints
    """(F,): index into ``table``; -1 for an object (``BytesStorageMetadata``)."""
    ndims: Ints
    """(F,): dimensions; 0 for an object."""
    shapes: Ints
    """Ragged, F entries: the sizes of the global tensors, in elements."""
    counts: Ints
    """(F,): the number of chunks of each tensor; 0 for an object. Their sum is C."""
    offsets: Ints
    """Ragged, C entries: the offsets of each chunk in its tensor, in elements; the chunks of one name are
    consecutive.
    """
    sizes: Ints
    """Ragged, C entries: the sizes of each chunk, in elements."""
    mappings: Any
    """``Metadata.planner_data``. For DCP's planners and this package's: the path of each name in the state dict
    (``key_paths.py``); None if the state dict was not flattened.
    """

    def tensor_shapes(self) -> list[tuple[int, ...]]:
        """For each name the size of the global tensor, in elements; () for an object."""
        values = iter(self.shapes.tolist())
        return [tuple(islice(values, ndim)) for ndim in self.ndims.tolist()]

    def owners(self) -> Ints:
        """(C + O,): for each row of a placement (all chunks, then all objects), the index of its name in ``names``."""
        numbers = np.arange(len(self.names))
        return np.concatenate([np.repeat(numbers, self.counts), numbers[self.properties < 0]])


@dataclass(frozen=True)
class FileRecord:
    """One data file of a checkpoint, as a reader must know it before opening. Sizes in bytes."""

    relative_path: str
    nbytes: int
    table_offset: int


@dataclass(frozen=True, eq=False)
class Placement:
    """The places of the bytes of a :class:`Catalog`'s C chunks and O objects: ``Metadata.storage_data`` in columns.

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
