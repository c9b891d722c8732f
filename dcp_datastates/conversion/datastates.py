"""Checkpoints of this package: read by its engine, verified; written with checksums, as ranks would have saved them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Final

import numpy as np
import torch

from dcp_datastates.conversion.destination import Output, write_file, write_small_file
from dcp_datastates.conversion.source import Source, contents_of
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.format.layout import LayoutItem, lay_out
from dcp_datastates.format.metadata import encode
from dcp_datastates.format.metadata_table import FileRecord, MetadataTable, Note, Placement
from dcp_datastates.io.committed import open_committed
from dcp_datastates.io.reads import Reads
from dcp_datastates.loading.stored import Stored, shards_of
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.process.work import Unit
from dcp_datastates.storage import local, operations
from dcp_datastates.storage.attempt import next_attempt
from dcp_datastates.storage.claims import Neighbours
from dcp_datastates.storage.decisions import DECISION_NAME
from dcp_datastates.storage.object_path import Location, stored

OURS: Final = "dcp_datastates"
"""The format's name, for people."""


class DataStatesSource(Source):
    """A committed checkpoint of this package. Every byte is verified before it is used."""

    def __init__(self, path: Location) -> None:
        self._stored = Stored(open_committed(path).table, [path])
        super().__init__(path, OURS, *contents_of(self._stored.table.catalog))
        self.attempt: Final = self._stored.table.note.attempt

    def read(self, names: Sequence[str]) -> list[torch.Tensor]:
        """See :class:`Source`."""
        found = list(map(self.memory_for, names))
        self._restore(self._stored.into(names, shards_of(names, found)))
        return found

    def object_bytes(self, name: str) -> bytes:
        """See :class:`Source`."""
        return self._restore(self._stored.objects([name]))

    def _restore(self, reads: Reads) -> bytes:
        objects: list[bytes] = []
        self._stored.read(reads, lambda part: objects.extend(map(part.data, part.objects)))
        return b"".join(objects)


@collection_paused()
def datastates_output(source: Source, folder: Path, beside: Path, shard_bytes: int) -> Output:
    """A checkpoint in the directory ``folder``, newer than those in the directory ``beside``: a data file for each
    shard, each as of one rank. Objects are copied, not unpickled.

    Raises :class:`ConfigurationError` for names that the format cannot store.
    """
    neighbours = Neighbours()
    neighbours.look(stored(beside))
    attempt = next_attempt(neighbours.newest)
    with local.explained("creating directory", folder):
        operations.make_directory(folder / attempt.name, "convert")
    units: list[Unit] = []
    records: dict[str, FileRecord] = {}
    rows: dict[str, tuple[int, int, int]] = {}  # of the placement, by names
    for rank, names in enumerate(source.groups(source.tensors, shard_bytes)):
        objects = {} if rank else {name: source.object_bytes(name) for name in source.objects}
        items = [
            LayoutItem(name, each.dtype, each.shape, (0,) * each.ndim)
            for name, each in ((name, source.tensors[name]) for name in names)
        ]
        items += [LayoutItem(name, None) for name in objects]
        try:
            layouts = lay_out(items, rank)  # one, or none without values
        except ValueError as error:
            raise ConfigurationError(f"this cannot be stored: {error}") from error
        for layout in layouts:
            file = layout.seal(list(map(len, objects.values())))
            path = f"{attempt.name}/{layout.name}"
            ordered = [names[entry.item] for entry in layout.tensors]
            begins = chain((entry.offset for entry in layout.tensors), file.object_offsets)
            lengths = chain((entry.nbytes for entry in layout.tensors), file.object_sizes)
            places = zip(repeat(len(records)), begins, lengths, strict=False)
            rows.update(zip([*ordered, *objects], places, strict=True))
            records[path] = FileRecord(path, file.nbytes, file.table_offset)
            write = partial(write_file, source, folder / path, file.header, ordered)
            units.append(partial(write, objects=objects.values(), table_offset=file.table_offset))
    columns = np.array([rows[name] for name in source.names()], np.int64).reshape(-1, 3).T
    placement = Placement(tuple(records), *map(np.ascontiguousarray, columns))
    note = Note(attempt, records, neighbours.newest, {}, time.time(), None)
    metadata = encode(MetadataTable(source.catalog(), placement, note))

    def finish() -> None:
        write_small_file(folder / attempt.name / DECISION_NAME, metadata)
        write_small_file(folder / local.METADATA_NAME, metadata)

    return Output(units, finish)
