"""Checkpoints of this package: read by its engine, verified; written with checksums, as ranks would have saved them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

from dcp_datastates.commit.place import EndedPart, Place, Round
from dcp_datastates.conversion.destination import Output, OutputFile, write_small_file
from dcp_datastates.conversion.source import Source, paths_of, shape_of
from dcp_datastates.errors import (
    CommitOutcomeUnknown,
    ConfigurationError,
    DataStatesError,
)
from dcp_datastates.format.layout import LayoutItem, lay_out
from dcp_datastates.format.metadata import encode
from dcp_datastates.format.metadata_objects import table_of
from dcp_datastates.format.metadata_table import FileRecord, Note
from dcp_datastates.io.committed import open_committed
from dcp_datastates.io.requests import Request
from dcp_datastates.loading.stored import Stored, shards_of
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.process.work import Progress, work
from dcp_datastates.storage import local, operations
from dcp_datastates.storage.attempt import next_attempt
from dcp_datastates.storage.claims import Claim, Neighbours
from dcp_datastates.storage.decisions import DECISION_NAME
from dcp_datastates.storage.object_path import Location, ObjectPath, stored


class DataStatesSource(Source):
    """A committed checkpoint of this package. Every byte is verified before it is used."""

    format = "dcp_datastates"

    def __init__(self, path: Location) -> None:
        self.path = path
        self._stored = stored = Stored(open_committed(path).table, [path])
        shapes = {name: shape_of(each.dtype, each.size) for name, each in stored.items() if each}
        self.tensors = shapes
        self.objects = dict.fromkeys(name for name in stored if name not in shapes)
        self.paths = paths_of(stored, stored.table.catalog.mappings)

    def read(self, names: Sequence[str]) -> list[torch.Tensor]:
        """See :class:`Source`."""
        found = list(map(self.memory_for, names))
        self._restore(self._stored.into(names, shards_of(names, found)))
        return found

    def object_bytes(self, name: str) -> bytes:
        """See :class:`Source`."""
        return self._restore([self._stored.object(name)])

    def _restore(self, requests: list[Request]) -> bytes:
        data = bytearray()
        self._stored.read(requests, lambda each: data.extend(each.data))
        return bytes(data)


def datastates_output(source: Source, folder: Path, beside: Path, shard_bytes: int) -> Output:
    """A checkpoint in the directory ``folder``, newer than those in the directory ``beside``.

    Raises :class:`ConfigurationError` for names that the format cannot store.
    """
    neighbours = Neighbours()
    neighbours.look(stored(beside))
    claim = Claim(next_attempt(neighbours.newest), neighbours.newest, alone=True)
    attempt = folder / claim.attempt.name
    with local.explained("creating directory", folder):
        operations.make_directory(attempt, "convert")
    files, metadata = _files(source, folder, claim, shard_bytes)

    def finish() -> None:
        write_small_file(attempt / DECISION_NAME, metadata)
        write_small_file(folder / local.METADATA_NAME, metadata)
        local.write_readme(folder)

    return Output([partial(file.write, source) for file in files], finish)


def write_to_store(
    source: Source,
    target: ObjectPath,
    shard_bytes: int,
    threads: int,
    overwrite: bool,
    progress: Progress | None,
) -> int:
    """Write ``source`` as the checkpoint at ``target``; returns the number of its files. It appears by its commit, in
    place of the checkpoint that was there.

    If this fails, what was there is still there. Raises :class:`ConfigurationError` for names that the format cannot
    store, :class:`CheckpointExistsError`, :class:`CommitOutcomeUnknown` and :class:`StorageError`.
    """
    place = Place(target)
    claim = place.claim(Neighbours(), overwrite)
    files, metadata = _files(source, target, claim, shard_bytes)
    save = Round(
        *(0, claim.attempt, target, EndedPart()),
        timeout=0.0,
        path=target,
        claim=claim,
        overwrite=overwrite,
    )
    try:
        units = [partial(file.write, source) for file in files]
        work(units, source.nbytes, threads, progress)
    except BaseException:
        place.tidy_after_failure(save, 0, 1)
        raise
    try:
        place.publish(save, metadata)
    except CommitOutcomeUnknown:
        raise
    except DataStatesError:
        place.tidy_after_failure(save, 0, 1)
        raise
    place.tidy_after_commit(save)
    return len(files)


@collection_paused()
def _files(
    source: Source, folder: Location, claim: Claim, shard_bytes: int
) -> tuple[list[OutputFile], bytes]:
    """The data files of a checkpoint at ``folder``, each as of one rank, and the bytes of its ``.metadata``. Objects
    are copied, not unpickled.
    """
    outputs: list[OutputFile] = []
    records: dict[str, FileRecord] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
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
            path = f"{claim.attempt.name}/{layout.name}"
            records[path] = FileRecord(path, file.nbytes, file.table_offset)
            ordered = [names[entry.item] for entry in layout.tensors]
            for name, entry in zip(ordered, layout.tensors, strict=True):
                places[source.index_of(name)] = _StorageInfo(path, entry.offset, entry.nbytes)
            spans = zip(file.object_offsets, file.object_sizes, strict=True)
            for name, (offset, nbytes) in zip(objects, spans, strict=True):
                places[source.index_of(name)] = _StorageInfo(path, offset, nbytes)
            content = ordered, list(objects.values()), file.table_offset
            outputs.append(OutputFile(folder / path, file.nbytes, file.header, *content))
    metadata = source.metadata(places, StorageMeta(save_id=claim.attempt.name))
    note = Note(claim.attempt, records, claim.after, {}, time.time(), None)
    return outputs, encode(table_of(metadata, note))
