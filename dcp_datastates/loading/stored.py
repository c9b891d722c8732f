"""What a checkpoint holds, looked up in its columns: a load makes no object for a tensor that it does not ask for."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.format.key_paths import KeyPath, empties, with_types
from dcp_datastates.format.metadata_objects import Columns
from dcp_datastates.format.metadata_table import MetadataTable
from dcp_datastates.format.nesting import path_of
from dcp_datastates.format.stored_names import Box, wrappers
from dcp_datastates.format.validate import elements
from dcp_datastates.io.requests import Request, aim
from dcp_datastates.io.tensor_memory import holds_shards
from dcp_datastates.loading.regions import PLAIN, cut, shards_of, volume


class Described(NamedTuple):
    """A stored tensor."""

    size: torch.Size
    dtype: torch.dtype


class Stored(Mapping[str, Described | None]):
    """The stored tensors by their names; None stands for an object."""

    def __init__(self, table: MetadataTable) -> None:
        self.table: Final = table
        self._columns = Columns(table.catalog)
        self._kinds = table.catalog.properties.tolist()
        self._dtypes = [properties.dtype for properties in table.catalog.table]
        needed, stored = elements(table.catalog)
        self._is_one_chunk = ((table.catalog.counts == 1) & (needed == stored)).tolist()
        self._known: dict[str, Described | None] = {}

    def __getitem__(self, name: str) -> Described | None:
        if name not in self._known:
            number = self._columns.number[name]
            kind, size = self._kinds[number], self._columns.shape(number)
            self._known[name] = None if kind < 0 else Described(size, self._dtypes[kind])
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.table.catalog.names)

    def __len__(self) -> int:
        return len(self.table.catalog.names)

    def __contains__(self, name: object) -> bool:
        return name in self._columns.number

    @functools.cached_property
    def wrappers(self) -> dict[str, dict[str, Box | None]]:
        """See :func:`~dcp_datastates.format.stored_names.wrappers`."""
        return wrappers(self)

    @functools.cached_property
    def _paths(self) -> object:
        return with_types(self.table.catalog.mappings)

    @functools.cached_property
    def empty(self) -> list[str]:
        """The names of empty dicts in the saved state, which have no value."""
        paths = self._paths
        return (
            [each for each in empties(paths) if each not in self] if isinstance(paths, dict) else []
        )

    def path_of(self, name: str) -> KeyPath:
        """Where the value called ``name`` was in the saved state."""
        return path_of(name, self._paths)

    def names_with_data(self, objects: bool) -> list[str]:
        """The names of tensors that have elements, and of objects if ``objects``."""
        return self._columns.names_with_data(objects)

    # ---- what to read --------------------------------------------------------------------------------

    def object(self, name: str, key: Any = None) -> Request:
        """What reads the object called ``name``."""
        return self._request(name, self._columns.object_rows[self._columns.number[name]], key)

    def into(self, name: str, value: Any, cast: bool, key: Any = None) -> list[Request]:
        """What reads this rank's part of the tensor called ``name`` into ``value``, a tensor of the same size.

        Raises :class:`IncompatibleStateError` if it cannot receive what is stored, or not all of it is stored.
        """
        size, _ = self._tensor(name)
        number = self._columns.number[name]
        if self._is_one_chunk[number] and type(value) in PLAIN and not holds_shards(value):
            if 0 in size:
                return []
            request = self._request(name, self._columns.first_chunk[number], key)
            request.chunk_sizes = request.lengths = size
            request.offsets = (0,) * len(size)
            aim(request, value, cast)
            return [request]
        requests = []
        for place, memory in shards_of(name, value):
            needed = left = volume(place)
            for request, part in self._parts(name, place, key):
                aim(request, cut(memory, place, part), cast)
                requests.append(request)
                left -= volume(part)
            if left:
                raise IncompatibleStateError(
                    f"of {name!r}, {needed - left} of {needed} elements are stored (a rank saved its shard alone?); "
                    f"choose others with only, or load it into a sharded state"
                )
        return requests

    def _parts(self, name: str, place: Box, key: Any) -> Iterator[tuple[Request, Box]]:
        """A request for each stored chunk with elements at ``place``, and the box of these elements."""
        if not volume(place):
            return
        columns, catalog, number = self._columns, self.table.catalog, self._columns.number[name]
        begins, ends = np.array(place, np.int64).reshape(-1, 2).T
        offsets, sizes = (
            columns.table(catalog.offsets, number),
            columns.table(catalog.sizes, number),
        )
        low, high = np.maximum(offsets, begins), np.minimum(offsets + sizes, ends)
        for chunk in np.flatnonzero((low < high).all(axis=1)).tolist():
            request = self._request(name, columns.first_chunk[number] + chunk, key)
            request.chunk_sizes = tuple(sizes[chunk].tolist())
            request.offsets = tuple((low[chunk] - offsets[chunk]).tolist())
            request.lengths = tuple((high[chunk] - low[chunk]).tolist())
            yield request, tuple(zip(low[chunk].tolist(), high[chunk].tolist(), strict=True))

    def _tensor(self, name: str) -> Described:
        found = self[name]
        assert found is not None
        return found

    def _request(self, name: str, row: int, key: Any) -> Request:
        placement, entry = self.table.placement, self[name]
        return Request(
            name,
            placement.paths[placement.files.item(row)],
            placement.begins.item(row),
            placement.lengths.item(row),
            key,
            None if entry is None else entry.dtype,
        )
