"""What a checkpoint holds, looked up in its columns: a load makes no object for a tensor that it does not ask for. And
its reads.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from dcp_datastates._native import Engine
from dcp_datastates.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    IncompatibleStateError,
)
from dcp_datastates.format.key_paths import KeyPath, empties, path_of, with_types
from dcp_datastates.format.metadata_table import MetadataTable
from dcp_datastates.format.ragged import Ints, positions, starts_of
from dcp_datastates.format.stored_names import Box, wrappers
from dcp_datastates.io.committed import explain_missing
from dcp_datastates.io.engine import DEFAULT_HOST_CACHE_BYTES, engine
from dcp_datastates.io.requests import Request, aim
from dcp_datastates.io.restore import Sharing, StoredCheckpoint, restore
from dcp_datastates.io.tensor_memory import PLAIN_TYPES
from dcp_datastates.loading.regions import Shards, cut, overlaps, rows_of
from dcp_datastates.staging.step_gate import release_memory
from dcp_datastates.storage.object_path import Location

_DTYPE, _NDIM, _SHAPE = map(operator.attrgetter, ("dtype", "ndim", "shape"))


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
        self._kinds = table.catalog.properties.tolist()
        self._dtypes = [properties.dtype for properties in table.catalog.table]

    def __getitem__(self, name: str) -> Described | None:
        number = self._catalog.number[name]
        kind = self._kinds[number]
        return None if kind < 0 else Described(self._catalog.shape(number), self._dtypes[kind])

    def __iter__(self) -> Iterator[str]:
        return iter(self._catalog.names)

    def __len__(self) -> int:
        return len(self._catalog.names)

    def __contains__(self, name: object) -> bool:
        return name in self._catalog.number

    @functools.cached_property
    def wrappers(self) -> dict[str, dict[str, Box | None]]:
        """See :func:`~dcp_datastates.format.stored_names.wrappers`."""
        return wrappers(self)

    @functools.cached_property
    def _paths(self) -> object:
        return with_types(self._catalog.mappings)

    @functools.cached_property
    def empty(self) -> list[str]:
        """The names of empty dicts in the saved state, which have no value."""
        paths = self._catalog.mappings
        if not isinstance(paths, dict):
            return []
        beside = {name: path for name, path in paths.items() if name not in self._catalog.number}
        return list(empties(with_types(beside)))

    def path_of(self, name: str) -> KeyPath:
        """Where the value called ``name`` was in the saved state."""
        return path_of(name, self._paths)

    def new(self, name: str) -> torch.Tensor | None:
        """A new tensor on the host for what is stored under this name; None for an object."""
        entry = self[name]
        return None if entry is None else torch.empty(entry.size, dtype=entry.dtype, device="cpu")

    def names_with_data(self) -> list[str]:
        """The names of tensors that have elements, and of objects."""
        return self._catalog.names_with_data()

    @property
    def has_objects(self) -> bool:
        """Whether there is any object."""
        return bool((self._catalog.properties < 0).any())

    def check_attempts(self, attempts: Iterable[str]) -> None:
        """Raise :class:`CheckpointReplacedError` if the ranks of a load have opened different ``attempts``."""
        if len(seen := set(attempts)) > 1:
            raise CheckpointReplacedError(
                f"{self.places[0]}: ranks see different attempts ({', '.join(sorted(seen))}): the checkpoint was "
                f"replaced meanwhile, or the path is not shared; load again"
            )

    # ---- what to read --------------------------------------------------------------------------------

    def are_tensors(self, names: Iterable[str]) -> list[bool]:
        """Whether there is a tensor of each of these names."""
        numbers = map(self._catalog.number.get, names)
        return [number is not None and self._kinds[number] >= 0 for number in numbers]

    def has_same(self, names: Sequence[str], values: Sequence[Any]) -> bool:
        """Whether ``values`` are tensors with the sizes and dtypes of those called ``names``: asked in passes over all.
        False also for some that are.
        """
        if not set(map(type, values)) <= {*PLAIN_TYPES, DTensor}:
            return False
        numbers, catalog = self._numbers(names), self._catalog
        sizes = list(chain.from_iterable(map(_SHAPE, values)))
        firsts, ndims = starts_of(catalog.ndims)[numbers], catalog.ndims[numbers]
        return (
            list(map(_DTYPE, values)) == [self._dtypes[self._kinds[n]] for n in numbers.tolist()]
            and list(map(_NDIM, values)) == ndims.tolist()
            and sizes == catalog.shapes[positions(firsts, ndims)].tolist()
        )

    def object(self, name: str, key: Any = None) -> Request:
        """What reads the object called ``name``."""
        row = np.array([self._catalog.object_rows[self._catalog.number[name]]])
        (file,), (begin,), (nbytes,) = self._places(row)
        return Request(name, file, begin, nbytes, key)

    def into(
        self, names: Sequence[str], shards: Shards, cast: bool = False, keys: Sequence[Any] = ()
    ) -> list[Request]:
        """What reads ``shards``, of the tensors called ``names``; each with the key of its tensor.

        Raises :class:`IncompatibleStateError` if one cannot receive what is stored, or not all of it is stored.
        """
        numbers = self._numbers(names)[shards.of]
        dtypes = [self._dtypes[self._kinds[number]] for number in numbers.tolist()]
        needed = np.array(list(map(math.prod, shards.sizes)), np.int64)
        left = needed.copy()
        requests: list[Request] = []
        targets: list[torch.Tensor] = []
        for found in overlaps(self._catalog, numbers, shards):
            shard = found.shard.tolist()
            of = [shards.of[each] for each in shard]
            requests += map(
                Request,
                [names[each] for each in of],
                *self._places(found.chunk),
                [keys[each] for each in of] if keys else repeat(None),
                [dtypes[each] for each in shard],
                rows_of(found.chunk_sizes),
                rows_of(found.in_chunk),
                rows_of(found.lengths),
            )
            memories = [shards.memories[each] for each in shard]
            nelements = found.lengths.prod(axis=1)
            for at in np.flatnonzero(nelements != needed[found.shard]).tolist():
                part = found.in_shard[at].tolist(), found.lengths[at].tolist()
                memories[at] = cut(memories[at], *part)
            targets += memories
            np.subtract.at(left, found.shard, nelements)
        for at in np.flatnonzero(left)[:1].tolist():
            name = names[shards.of[at]]
            raise IncompatibleStateError(
                f"of {name!r}, {needed[at] - left[at]} of {needed[at]} elements are stored (a rank saved its shard "
                f"alone?); leave it out with exclude={name!r}, or load it into a sharded state"
            )
        aim(requests, targets, cast)
        return requests

    def read(
        self,
        requests: list[Request],
        deliver: Callable[[Request], None],
        *,
        sharing: Sharing | None = None,
        count: Callable[[int], None] = lambda nbytes: None,
        native: Engine | None = None,
    ) -> None:
        """:func:`~dcp_datastates.io.restore.restore`, from the nearest place, once no save in flight reads the memory
        that it overwrites. A data file that is missing is damage, or another save's doing, and the error says which.

        ``native``: the engine; None: the process's own, of the usual size.
        """
        source = StoredCheckpoint(self.table, self.places, sharing)
        native = native or engine(DEFAULT_HOST_CACHE_BYTES)
        try:
            restore(requests, source, native, deliver, _release, count)
        except CheckpointNotFoundError as error:
            raise explain_missing(self.places[0], self.table.note, error) from error

    def _numbers(self, names: Sequence[str]) -> Ints:
        number = self._catalog.number
        return np.array([number[name] for name in names], np.int64)

    def _places(self, rows: Ints) -> tuple[list[str], list[int], list[int]]:
        """The files of these rows, and where they begin there and their lengths, in bytes."""
        placement = self.table.placement
        files = [placement.paths[file] for file in placement.files[rows].tolist()]
        return files, placement.begins[rows].tolist(), placement.lengths[rows].tolist()


def _release(storages: set[torch.UntypedStorage]) -> None:
    release_memory(storages, "a load")
