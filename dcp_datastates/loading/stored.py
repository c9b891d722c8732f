"""What a checkpoint holds, looked up in its columns: a load makes no object for a tensor that it does not ask for. What
a rank holds of tensors, what it needs of the stored chunks, and its reads.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from dcp_datastates.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    IncompatibleStateError,
)
from dcp_datastates.format.key_paths import KeyPath, empties, path_of
from dcp_datastates.format.metadata_table import MetadataTable
from dcp_datastates.format.ragged import Ints, distinct, positions, starts_of, volumes
from dcp_datastates.format.stored_names import Box, is_under, wrappers
from dcp_datastates.io.committed import explain_missing
from dcp_datastates.io.engine import engine
from dcp_datastates.io.reads import Reads, Sizes, shapes_of
from dcp_datastates.io.restore import Restore, Sharing
from dcp_datastates.io.tensor_memory import (
    PLAIN_TYPES,
    any_hold_shards,
    box,
    holds_shards,
    is_elsewhere,
    shards_as_dcp_sees_them,
)
from dcp_datastates.staging.step_gate import release_memory
from dcp_datastates.storage.object_path import Location

Marks = npt.NDArray[np.bool_]
"""(F,): a choice of the stored values, in the order of their names."""

_DTYPE: Final = operator.attrgetter("dtype")

_MOST_PAIRS: Final = 1 << 18
"""How many shards are compared with a chunk each in one pass, which bounds its memory: 100 bytes for each dimension."""


class Described(NamedTuple):
    """A stored tensor."""

    size: torch.Size
    dtype: torch.dtype


class Stored(Mapping[str, Described | None]):
    """The stored tensors by their names; None stands for an object.

    Args:
        places: where the checkpoint is, the nearest place first.
    """

    def __init__(self, table: MetadataTable, places: Sequence[Location]) -> None:
        self.table: Final = table
        self.places: Final = places
        self._catalog: Final = table.catalog
        self._dtypes = [*(each.dtype for each in table.catalog.table), None]  # at -1: of an object

    def __getitem__(self, name: str) -> Described | None:
        number = self._catalog.number[name]
        dtype = self._dtypes[self._catalog.properties[number]]
        return None if dtype is None else Described(self._catalog.shape(number), dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._catalog.names)

    def __len__(self) -> int:
        return len(self._catalog.names)

    def __contains__(self, name: object) -> bool:
        return name in self._catalog.number

    @functools.cached_property
    def wrappers(self) -> dict[str, dict[str, Box | None]]:
        """See :func:`~dcp_datastates.format.stored_names.wrappers`."""
        return wrappers(self._catalog.names)

    @functools.cached_property
    def empty(self) -> dict[str, None]:
        """The names of empty dicts in the saved state, which have no value."""
        paths = self._catalog.mappings
        beside = paths.keys() - self._catalog.number.keys() if isinstance(paths, dict) else ()
        return dict.fromkeys(name for name in empties(paths) if name in beside) if beside else {}

    def path_of(self, name: str) -> KeyPath:
        """Where the value called ``name`` was in the saved state."""
        return path_of(name, self._catalog.mappings)

    def new(self, name: str) -> torch.Tensor | None:
        """A new tensor on the host for what is stored under this name; None for an object."""
        entry = self[name]
        return None if entry is None else torch.empty(entry.size, dtype=entry.dtype, device="cpu")

    def check_attempts(self, attempts: Iterable[str]) -> None:
        """Raise :class:`CheckpointReplacedError` if the ranks of a load have opened different ``attempts``."""
        if len(seen := set(attempts)) > 1:
            raise CheckpointReplacedError(
                f"{self.places[0]}: ranks see different attempts ({', '.join(sorted(seen))}): the checkpoint was "
                f"replaced meanwhile, or the path is not shared; load again"
            )

    def marks(self, names: Collection[str]) -> Marks:
        """(F,): which of the stored values have one of these names, or are parts of a wrapper that has one."""
        number = self._catalog.number
        found = np.zeros(len(self), np.bool_)
        found[[number[name] for name in names if name in number]] = True
        if self.wrappers:
            wrapped = frozenset(self.wrappers).intersection(names)
            found |= [is_under(name, wrapped) for name in self]
        return found

    def unread(self, asked: Marks) -> list[str]:
        """The names of the values that are not ``asked`` for, and have bytes."""
        return list(compress(self, (self._catalog.have_data & ~asked).tolist()))

    # ---- what to read --------------------------------------------------------------------------------

    def kinds(self, names: Iterable[str | None]) -> Ints:
        """(N,): 1 for the name of a tensor, 0 for that of an object, and -1 if no value has the name."""
        number: Mapping[Any, int] = self._catalog.number
        kinds = np.append(np.int64(self._catalog.properties >= 0), -1)
        return kinds[[number.get(name, -1) for name in names]]

    def shapes_if_same(
        self, names: Sequence[str], values: Sequence[Any]
    ) -> tuple[Ints, Ints] | None:
        """:func:`shapes_of` the ``values``, if they are tensors with the shapes and dtypes of those called ``names``:
        asked in passes over all. None also for some that are.
        """
        if not set(map(type, values)) <= {*PLAIN_TYPES, DTensor}:
            return None
        numbers, catalog = self._numbers(names), self._catalog
        firsts, ndims = starts_of(catalog.ndims)[numbers], catalog.ndims[numbers]
        found = shapes_of(values)
        is_same = (
            list(map(_DTYPE, values)) == self._dtypes_of(numbers)
            and np.array_equal(found[0], ndims)
            and np.array_equal(found[1], catalog.shapes[positions(firsts, ndims)])
        )
        return found if is_same else None

    def objects(self, names: Sequence[str]) -> Reads:
        """What reads the objects called ``names``."""
        numbers, row_of = self._numbers(names), self._catalog.object_rows
        rows = np.array([row_of[number] for number in numbers.tolist()], np.int64)
        sizes = self.table.placement.lengths[rows]
        return self._rows(numbers, rows, np.ones_like(rows), (sizes, np.zeros_like(sizes), sizes))

    def into(self, names: Sequence[str], shards: Shards, cast: bool = False) -> Reads:
        """What reads ``shards``, of the tensors called ``names``, into their memories, if they have any.

        Raises :class:`IncompatibleStateError` if one cannot receive what is stored, or not all of it is stored.
        """
        numbers = self._numbers(names)[shards.of]
        needed = volumes(shards.ndims, shards.sizes)
        left = needed.copy()
        parts = [self.objects([])]  # no row yet
        targets: list[torch.Tensor] = []
        for part, of, begins in self._common(numbers, shards):
            parts.append(part)
            nelements = volumes(part.ndims, part.lengths)
            np.subtract.at(left, of, nelements)
            if shards.memories:
                memories = [shards.memories[each] for each in of.tolist()]
                lengths = part.lengths.reshape(begins.shape)
                for at in np.flatnonzero(nelements != needed[of]).tolist():
                    memories[at] = cut(memories[at], begins[at].tolist(), lengths[at].tolist())
                targets += memories
        for at in np.flatnonzero(left)[:1].tolist():
            name = names[shards.of[at]]
            raise IncompatibleStateError(
                f"of {name!r}, {needed[at] - left[at]} of {needed[at]} elements are stored (a rank saved its shard "
                f"alone?); leave it out with exclude={name!r}, or load it into a sharded state"
            )
        reads = Reads.joined(parts)
        if shards.memories:
            reads.aim(targets, cast)
        return reads

    def _common(self, numbers: Ints, shards: Shards) -> Iterator[tuple[Reads, Ints, Ints]]:
        """What reads ``shards``, of the tensors with these ``numbers``, from the stored chunks: in parts, each of one
        number of dimensions. With each part, for its rows: the place of the shard among all; and, (rows, dimensions),
        where the row begins in the shard, in elements.
        """
        catalog = self._catalog
        firsts = starts_of(catalog.counts)
        values = starts_of(catalog.ndims * catalog.counts)
        ndims = catalog.ndims[numbers]
        for ndim in distinct(ndims):
            alike = np.flatnonzero(ndims == ndim)
            group = starts_of(catalog.counts[numbers[alike]]) // _MOST_PAIRS
            for each in distinct(group):
                chosen = alike[group == each]
                tensors = numbers[chosen]
                counts = catalog.counts[tensors]
                pair = np.repeat(np.arange(len(chosen)), counts)
                place = positions(np.zeros(len(chosen), np.int64), counts)
                at = (values[tensors][pair] + place * ndim)[:, None] + np.arange(ndim)
                offsets, sizes = catalog.offsets[at], catalog.sizes[at]
                begins, lengths = shards.places(chosen, ndim)
                low = np.maximum(offsets, begins[pair])
                high = np.minimum(offsets + sizes, (begins + lengths)[pair])
                hit = np.flatnonzero((low < high).all(axis=1))
                pair, low, high = pair[hit], low[hit], high[hit]
                rows = firsts[tensors][pair] + place[hit]
                ragged = sizes[hit].ravel(), (low - offsets[hit]).ravel(), (high - low).ravel()
                part = self._rows(tensors[pair], rows, np.full(len(hit), ndim), ragged)
                yield part, chosen[pair], low - begins[pair]

    def _rows(
        self, numbers: Ints, rows: Ints, ndims: Ints, ragged: tuple[Ints, Ints, Ints]
    ) -> Reads:
        """What reads regions of the chunks, or objects, in these ``rows`` of the checkpoint's columns, which are those
        of the values with these ``numbers``. ``ragged``: the sizes of the chunks; where the regions begin in them; the
        sizes of the regions.
        """
        of = self.table.placement
        names = list(map(self._catalog.names.__getitem__, numbers.tolist()))
        places = of.files[rows], of.begins[rows], of.lengths[rows]
        return Reads(of.paths, names, self._dtypes_of(numbers), *places, ndims, *ragged)

    def read(
        self,
        reads: Reads,
        deliver: Callable[[Reads], None],
        *,
        sharing: Sharing | None = None,
        count: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """:meth:`~dcp_datastates.io.restore.Restore.read`, from the nearest place, once no save in flight reads the
        memory that it overwrites. A data file that is missing is damage, or another save's doing, and the error says
        which.
        """
        restore = Restore(self.table, self.places, engine(), count, sharing)
        try:
            restore.read(reads, deliver, _release)
        except CheckpointNotFoundError as error:
            raise explain_missing(self.places[0], self.table.note, error) from error

    def _numbers(self, names: Sequence[str]) -> Ints:
        number = self._catalog.number
        return np.array([number[name] for name in names], np.int64)

    def _dtypes_of(self, numbers: Ints) -> list[torch.dtype | None]:
        kinds = self._catalog.properties[numbers].tolist()
        return list(map(self._dtypes.__getitem__, kinds))


def _release(storages: Iterable[torch.UntypedStorage]) -> None:
    release_memory(storages, "a load")


# ---- what a rank holds, and what it needs of the stored chunks ------------------------------------


@dataclass(frozen=True)
class Shards:
    """What this rank holds of tensors, in columns. Begins and sizes are ragged: a value for each dimension."""

    of: Ints
    """The tensor, by its place among all."""
    ndims: Ints
    begins: Ints
    """Where each shard begins in its tensor, in elements."""
    sizes: Ints
    """In elements."""
    memories: list[torch.Tensor]

    def places(self, chosen: Ints, ndim: int) -> tuple[Ints, Ints]:
        """(chosen, dimensions): the begins and the sizes of those, which have ``ndim`` dimensions."""
        at = starts_of(self.ndims)[chosen, np.newaxis] + np.arange(ndim)
        return self.begins[at], self.sizes[at]


def shards_of(
    names: Iterable[str], values: Iterable[Any], shapes: tuple[Ints, Ints] | None = None
) -> Shards:
    """What this rank holds of tensors of the state, which are called ``names``. Nothing outside a mesh. ``shapes``: as
    :func:`shapes_of`, if they are known.
    """
    values = list(values)
    if set(map(type, values)) <= PLAIN_TYPES and not any_hold_shards(values):
        ndims, sizes = shapes_of(values) if shapes is None else shapes
        return Shards(np.arange(len(values)), ndims, np.zeros_like(sizes), sizes, values)
    found = list(_shards(names, values))
    of, begins, lengths, memories = zip(*found, strict=True) if found else ((), (), (), ())
    return Shards(
        np.array(of, np.int64),
        np.array(list(map(len, begins)), np.int64),
        np.array(list(chain.from_iterable(begins)), np.int64),
        np.array(list(chain.from_iterable(lengths)), np.int64),
        list(memories),
    )


def _shards(
    names: Iterable[str], values: Sequence[Any]
) -> Iterator[tuple[int, Sizes, Sizes, torch.Tensor]]:
    """For each shard: the place of its tensor among all, where it begins, its sizes, and its memory."""
    places: dict[Any, tuple[Sizes, Sizes] | None] = {}
    """Of DTensors that are placed alike: torch reckons it in 20 us. None outside a mesh."""
    for number, (name, value) in enumerate(zip(names, values, strict=True)):
        kind = type(value)
        if kind in PLAIN_TYPES and not holds_shards(value):
            yield number, (0,) * value.dim(), value.shape, value
        elif kind is DTensor and type(value._local_tensor) in PLAIN_TYPES:
            spec, local = value._spec, value._local_tensor
            if spec not in places:
                places[spec] = _place(name, value)
            if (place := places[spec]) is None:
                continue
            if local.shape != place[1] and 0 not in place[1]:  # an empty shard may have any shape
                raise IncompatibleStateError(
                    f"{name!r} cannot be loaded: its local tensor has the shape {tuple(local.shape)}, and the shard "
                    f"that it stands for {place[1]}"
                )
            yield number, *place, local
        else:
            for shard in shards_as_dcp_sees_them(name, value):
                yield number, *shard


def _place(name: str, value: DTensor) -> tuple[Sizes, Sizes] | None:
    """Where this rank's part of a DTensor begins, and its sizes, in elements; None outside its mesh."""
    if is_elsewhere(value):
        return None
    if any(placement.is_partial() for placement in value.placements):
        raise IncompatibleStateError(
            f"{name!r} cannot be loaded: the state has partial sums of it ({value.placements}); redistribute() it"
        )
    place = box(value)
    return tuple(begin for begin, _ in place), tuple(end - begin for begin, end in place)


def cut(tensor: torch.Tensor, begins: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """The part of a tensor that begins there, in elements, and has these ``lengths``."""
    for dimension, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        if length != tensor.size(dimension):
            tensor = tensor.narrow(dimension, begin, length)
    return tensor
