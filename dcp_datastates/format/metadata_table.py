"""The contents of a ``.metadata`` file: the tensors of a whole checkpoint and their chunks in columns, and a note.

A job of a thousand ranks has a million chunks. As objects, they take seconds to make, and seconds to pickle, under the
GIL; arrays avoid both.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_datastates.format.ragged import Ints, starts_of, sums
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.claims import Claim

STORED: Final[Mapping[int, np.dtype[Any]]] = {
    width: np.dtype(f"<{kind}{width}") for width, kind in ((1, "u"), (2, "u"), (4, "u"), (8, "i"))
}
"""The types of stored columns, by the bytes of a value."""


def narrowed(values: Ints) -> npt.NDArray[Any]:
    """The same values, in the narrowest of the types :data:`STORED`."""
    most = int(values.max(initial=0)) if values.min(initial=0) >= 0 else 1 << 62
    return values.astype(STORED[next((width for width in (1, 2, 4) if most < 1 << 8 * width), 8)])


CATALOG: Final = ("properties", "ndims", "shapes", "counts", "offsets", "sizes")
PLACEMENT: Final = ("files", "begins", "lengths")
"""The columns of the two tables, as a file has them."""


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

    @functools.cached_property
    def number(self) -> dict[str, int]:
        """The index of each name."""
        return {name: number for number, name in enumerate(self.names)}

    @functools.cached_property
    def object_rows(self) -> dict[int, int]:
        """The rows of objects in a :class:`Placement`, by the indices of their names."""
        objects = np.flatnonzero(self.properties < 0).tolist()
        return {number: row for row, number in enumerate(objects, self.chunks)}

    @functools.cached_property
    def _first_values(self) -> tuple[list[int], list[int]]:
        """Where each name's part begins in ``shapes``, and in ``offsets`` and ``sizes``."""
        return starts_of(self.ndims).tolist(), starts_of(self.ndims * self.counts).tolist()

    def shape(self, number: int) -> torch.Size:
        """The size of the global tensor with this index, in elements; no dimensions for an object."""
        begin = self._first_values[0][number]
        return torch.Size(self.shapes[begin : begin + self.ndims.item(number)].tolist())

    def of_chunks(self, column: Ints, number: int) -> Ints:
        """(chunks, dimensions): the part of ``offsets`` or ``sizes`` for the tensor with this index."""
        begin = self._first_values[1][number]
        count, ndim = self.counts.item(number), self.ndims.item(number)
        return column[begin : begin + count * ndim].reshape(count, ndim)

    @property
    def have_data(self) -> npt.NDArray[np.bool_]:
        """(F,): whether it is a tensor that has elements, or an object."""
        have: npt.NDArray[np.bool_] = sums(self.ndims, (self.shapes == 0).astype(np.int64)) == 0
        return have

    @functools.cached_property
    def chunks(self) -> int:
        """The number of chunks."""
        return int(self.counts.sum())

    def owners(self) -> Ints:
        """(R,): for each row of a :class:`Placement`, the index of its name in ``names``."""
        numbers = np.arange(len(self.names))
        return np.concatenate([np.repeat(numbers, self.counts), numbers[self.properties < 0]])


Made = TypeVar("Made")


def once(make: Callable[[Catalog], Made]) -> Callable[[Catalog], Made]:
    """``make``, which is called once for a catalog: saves whose structure is unchanged have the same."""
    known: weakref.WeakKeyDictionary[Catalog, Made] = weakref.WeakKeyDictionary()

    @functools.wraps(make)
    def made(catalog: Catalog) -> Made:
        if catalog not in known:
            known[catalog] = make(catalog)
        return known[catalog]

    return made


@dataclass(frozen=True)
class FileRecord:
    """One data file of a checkpoint, as a reader must know it before opening. Sizes in bytes."""

    relative_path: str
    nbytes: int
    table_offset: int


@dataclass(frozen=True, eq=False)
class Placement:
    """The places of the bytes of a :class:`Catalog`.

    It has R rows: all chunks, then all objects, the names with ``properties == -1``, in the order of ``names``.
    """

    paths: tuple[str, ...]
    """Relative paths of the data files."""
    files: Ints
    """(R,): index into ``paths``."""
    begins: Ints
    """(R,): the offset of the first byte in the file."""
    lengths: Ints
    """(R,): in bytes."""


Trace = Mapping[str, Any] | None
"""The value of ``trace`` in the document."""

Compose = Callable[[Sequence[bytes], Claim, Trace], bytes]
"""Makes the bytes of ``.metadata``: of all ranks' reports, which came with their votes, of how the attempt was claimed,
and of what the save has cost.
"""


class Compared(NamedTuple):
    """Which part of the replicas was found equal, byte for byte: ``number`` of ``of``, by the plan with this name."""

    number: int
    of: int
    plan: str


@dataclass(frozen=True)
class Note:
    """This package's note in the metadata of a checkpoint.

    ``after``: the newest attempt at the path or beside it when this one was claimed; None if unknown. ``metrics``: the
    numbers by which the user compares checkpoints. ``published_at``: when the metadata were written, right before the
    commit, in seconds since the epoch by the coordinator's clock. ``trace``: what each rank's part cost
    (``save_trace.py``, which checks it); None of a checkpoint that was converted. ``compared``: None if the save has
    compared no replicas.
    """

    attempt: Attempt
    files: Mapping[str, FileRecord]
    after: Attempt | None
    metrics: Mapping[str, float]
    published_at: float
    trace: Trace
    compared: Compared | None = None


@dataclass(frozen=True, eq=False)
class MetadataTable:
    """The contents of a ``.metadata`` file. ``placement.paths`` are the keys of ``note.files``, in order."""

    catalog: Catalog
    placement: Placement
    note: Note
