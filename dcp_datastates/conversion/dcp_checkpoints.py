"""Checkpoints of DCP: this package's and stock's.

This package's are read by its engine, verified, and written with checksums, as ranks would have saved them.

Stock DCP's (``FileSystemWriter``) are chunks that ``torch.save`` has written, one after another in files, and metadata
that are a pickle. These are unpickled with the few classes that stock DCP writes; a pickle that needs others is
refused, unless the user trusts it.
"""

from __future__ import annotations

import io
import os
import pickle
import time
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from dcp_datastates.conversion.destination import Run, contents, with_checksums, write_file
from dcp_datastates.conversion.source import Source, file_bytes, loaded, read_part, read_whole
from dcp_datastates.conversion.torch_file import own, save_to
from dcp_datastates.errors import CheckpointCorruptError, ConfigurationError, IncompatibleStateError
from dcp_datastates.format import key_paths
from dcp_datastates.format.layout import LayoutItem, SealedFile
from dcp_datastates.format.metadata import DCP_VERSION, encode
from dcp_datastates.format.metadata_check import check_covered, validate
from dcp_datastates.format.metadata_objects import catalog_of
from dcp_datastates.format.metadata_table import Catalog, FileRecord, MetadataTable, Note, Placement
from dcp_datastates.io.committed import open_committed
from dcp_datastates.io.unpickling import BoundedUnpickler, unsafe
from dcp_datastates.loading.stored import Stored, shards_of
from dcp_datastates.planning.part_files import PartFiles
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.process.work import Done, Unit
from dcp_datastates.storage import local, operations
from dcp_datastates.storage.attempt import next_attempt
from dcp_datastates.storage.claims import Neighbours
from dcp_datastates.storage.decisions import DECISION_NAME
from dcp_datastates.storage.object_path import Location, stored

OURS: Final = "dcp_datastates"
"""This package's format, for people."""

_Places = dict[MetadataIndex, _StorageInfo]


class _DcpSource(Source):
    """A checkpoint with this checked ``catalog``."""

    def __init__(self, path: Location, kind: str, catalog: Catalog) -> None:
        dtypes = [properties.dtype for properties in catalog.table]
        tensors: dict[str, torch.Tensor] = {}
        objects: dict[str, Callable[[], bytes]] = {}
        for number, (name, of) in enumerate(
            zip(catalog.names, catalog.properties.tolist(), strict=True)
        ):
            if of < 0:
                objects[name] = partial(self._object, name)
            else:
                shape = catalog.shape(number)
                tensors[name] = torch.empty(shape, dtype=dtypes[of], device="meta")
        known = catalog.mappings if isinstance(catalog.mappings, dict) else {}
        paths = {name: known[name] for name in key_paths.empties(known)}
        paths |= {name: key_paths.path_of(name, known) for name in catalog.names}
        super().__init__(path, kind, tensors, objects, paths)

    def _object(self, name: str) -> bytes:
        raise NotImplementedError


def _metadata(source: Source, places: _Places) -> Metadata:
    """What DCP knows of a checkpoint that has each tensor as one chunk, at these ``places``."""
    paths, about = dict(source.paths), dcp_metadata.StorageMeta()
    metadata = Metadata({}, paths, places, about, DCP_VERSION)
    for name, each in source.tensors.items():
        properties = dcp_metadata.TensorProperties(dtype=each.dtype)
        chunk = ChunkStorageMetadata(_begin(each), each.shape)
        entry = TensorStorageMetadata(properties, each.shape, [chunk])
        metadata.state_dict_metadata[name] = entry
    for name in source.objects:
        metadata.state_dict_metadata[name] = dcp_metadata.BytesStorageMetadata()
    return metadata


def _begin(tensor: torch.Tensor) -> torch.Size:
    """Where the one chunk of a tensor begins."""
    return torch.Size([0] * tensor.ndim)


# ---- this package's ------------------------------------------------------------------------------


class DataStatesSource(_DcpSource):
    """A committed checkpoint of this package. Every byte is verified before it is used."""

    def __init__(self, path: Location) -> None:
        self._stored = Stored(open_committed(path).table, [path])
        super().__init__(path, OURS, self._stored.table.catalog)
        self.attempt: Final = self._stored.table.note.attempt

    def read(self, names: Sequence[str]) -> list[torch.Tensor]:
        """See :class:`Source`."""
        found = list(map(self.memory_for, names))
        self._stored.read(self._stored.into(names, shards_of(names, found)), lambda _: None)
        return found

    def _object(self, name: str) -> bytes:
        found: list[bytes] = []
        reads = self._stored.objects([name])
        self._stored.read(reads, lambda part: found.extend(map(part.data, part.objects)))
        return b"".join(found)


def write_datastates(
    source: Source, folder: Path, beside: Path, shard_bytes: int, run: Run
) -> None:
    """Write a checkpoint to the directory ``folder``, newer than those in the directory ``beside``: a data file for
    each shard, each as of one rank. Objects are copied, not unpickled.

    Raises :class:`ConfigurationError` for names that the format cannot store.
    """
    neighbours = Neighbours()
    neighbours.look(stored(beside))
    attempt = next_attempt(neighbours.newest)
    with local.explained("creating directory", folder):
        operations.make_directory(folder / attempt.name, "convert")
    note = Note(attempt, {}, neighbours.newest, {}, time.time(), None)
    units, metadata = _laid_out(source, folder, shard_bytes, note)
    run(units)
    write_file(folder / attempt.name / DECISION_NAME, [metadata])
    write_file(folder / local.METADATA_NAME, [metadata])


@collection_paused()
def _laid_out(
    source: Source, folder: Path, shard_bytes: int, note: Note
) -> tuple[list[Unit], bytes]:
    """What writes the data files, and the metadata with this ``note``, which has no files yet."""
    units: list[Unit] = []
    records: dict[str, FileRecord] = {}
    tensors, objects_of = [], []  # where each lies: the number of its file, its offset, its length
    for rank, names in enumerate(source.groups(source.tensors, shard_bytes)):
        objects = {} if rank else {name: read() for name, read in source.objects.items()}
        shaped = ((name, source.tensors[name]) for name in names)
        items = [LayoutItem(name, each.dtype, each.shape, _begin(each)) for name, each in shaped]
        try:
            part = PartFiles([*items, *(LayoutItem(name, None) for name in objects)], rank)
        except ValueError as error:
            raise ConfigurationError(f"this cannot be stored: {error}") from error
        sizes = tuple(map(len, objects.values()))
        files, report = part.seal((sizes,) * len(part.layouts))  # one file, or none without values
        places = np.array([report.numbers + len(records), report.offsets, report.lengths])
        tensors.append(places[:, : len(names)])
        objects_of.append(places[:, len(names) :])
        for layout, file in zip(part.layouts, files, strict=True):
            path = f"{note.attempt.name}/{layout.name}"
            records[path] = FileRecord(path, file.nbytes, file.table_offset)
            ordered = [names[entry.item] for entry in layout.tensors]
            units.append(partial(_write, source, folder / path, file, ordered, objects))
    placement = Placement(tuple(records), *np.concatenate([*tensors, *objects_of], axis=1))
    catalog = catalog_of(_metadata(source, {}))
    return units, encode(MetadataTable(catalog, placement, replace(note, files=records)))


def _write(
    source: Source,
    path: Path,
    file: SealedFile,
    names: Sequence[str],
    objects: Mapping[str, bytes],
    done: Done,
) -> None:
    pieces = chain([file.header], contents(source, names, done), objects.values())
    write_file(path, with_checksums(pieces, file.table_offset), source.nbytes)


# ---- stock's -------------------------------------------------------------------------------------


_OTHERS: Final = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    ("pathlib._local", "PosixPath"),
}
"""What stock metadata name beside DCP's own classes and torch's dtypes."""


class StockSource(_DcpSource):
    """A checkpoint of stock DCP."""

    def __init__(self, path: Location, allow_objects: bool) -> None:
        metadata = _read_metadata(path / local.METADATA_NAME, allow_objects)
        self._entries = metadata.state_dict_metadata
        self._places = metadata.storage_data or {}
        try:
            catalog = catalog_of(metadata)
            if wrong := validate(catalog, filled=False):
                raise ValueError(wrong[0])
            key_paths.check_paths(metadata.planner_data, catalog.names)
            super().__init__(path, "stock DCP", catalog)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointCorruptError(f"{path}: the metadata are malformed: {error}") from error

    def read(self, names: Sequence[str]) -> list[torch.Tensor]:
        """See :class:`Source`."""
        return list(map(self._tensor, names))

    def _tensor(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        assert isinstance(entry, TensorStorageMetadata)
        way_out = f"leave it out with exclude={name!r}"
        check_covered(name, entry.size, (chunk.sizes for chunk in entry.chunks), way_out)
        chunks = [chunk for chunk in entry.chunks if 0 not in chunk.sizes]
        if len(chunks) == 1:
            return self._chunk(name, chunks[0])
        whole = self.memory_for(name)
        for chunk in chunks:
            part = narrow_tensor_by_index(whole, chunk.offsets, chunk.sizes)
            part.copy_(self._chunk(name, chunk))
        return whole

    def _chunk(self, name: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        """A stored chunk, as torch reads it."""
        said = f"{self.path}: a chunk of {name!r}"
        data = self._data(MetadataIndex(name, chunk.offsets))
        nbytes = data.getbuffer().nbytes
        found = loaded(data, said, allow_objects=False)
        dtype, sizes = self.tensors[name].dtype, chunk.sizes
        if not isinstance(found, torch.Tensor) or (found.dtype, found.shape) != (dtype, sizes):
            kind = (
                f"{getattr(found, 'dtype', type(found).__name__)} {[*getattr(found, 'shape', [])]}"
            )
            raise CheckpointCorruptError(
                f"{said} is {kind}, and the metadata say {dtype} {[*sizes]}"
            )
        if found.nbytes > nbytes:  # all of whose elements are one
            raise CheckpointCorruptError(
                f"{said} has {found.nbytes} bytes, of which {nbytes} are stored"
            )
        return found.resolve_conj().resolve_neg()

    def _object(self, name: str) -> bytes:
        return self._data(MetadataIndex(name)).getvalue()

    def _data(self, index: MetadataIndex) -> io.BytesIO:
        """What is stored, which lies within a file of the checkpoint."""
        info = self._places.get(index)
        if not isinstance(info, _StorageInfo):
            raise CheckpointCorruptError(
                f"{self.path}: the metadata do not say where {index.fqn!r} is stored"
            )
        extensions = getattr(info, "transform_descriptors", None)
        if extensions:
            raise IncompatibleStateError(
                f"{self.path}: {index.fqn!r} was written with the extensions {list(extensions)}; load it with DCP, and "
                f"save it without them"
            )
        relative = Path(str(info.relative_path))
        if relative.is_absolute() or ".." in relative.parts:
            raise CheckpointCorruptError(
                f"{self.path}: the metadata name the file {str(relative)!r}, which is outside of the checkpoint"
            )
        begin, length, file = info.offset, info.length, self.path / relative
        are_numbers = type(begin) is type(length) is int and begin >= 0 and length >= 0
        if not are_numbers or begin + length > file_bytes(file):
            raise CheckpointCorruptError(
                f"{self.path}: {index.fqn!r} is said to lie at {begin!r} with {length!r} bytes in {relative}, which is "
                f"cut short, or the metadata are damaged"
            )
        return io.BytesIO(read_part(file, begin, length))


class _Unpickler(BoundedUnpickler):
    """Unpickles what stock DCP writes, and nothing else."""

    dispatch: ClassVar[dict[int, Any]] = dict(BoundedUnpickler.dispatch)

    def load_build(self) -> None:
        if isinstance(self.stack[-2], (type, types.FunctionType)):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("Unsupported operation: it changes a class")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.distributed.checkpoint.metadata" and "." not in name:
            found = getattr(dcp_metadata, name, None)
            if isinstance(found, type) and found.__module__ == module:
                return found
        elif (module, name) in _OTHERS:
            return OrderedDict if name == "OrderedDict" else super().find_class(module, name)
        elif module == "torch" and isinstance(
            getattr(torch, name, None), (torch.dtype, torch.layout, torch.memory_format)
        ):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"Unsupported global: {module}.{name}")


def _read_metadata(path: Location, allow_objects: bool) -> Metadata:
    data = io.BytesIO(read_whole(path))
    try:
        metadata = (pickle.Unpickler if allow_objects else _Unpickler)(data).load()
    except pickle.UnpicklingError as error:
        said, _, needed = str(error).partition("Unsupported global: ")
        if needed and not said:
            raise unsafe(str(path), needed, "exclude it") from error
        raise CheckpointCorruptError(f"{path}: {error}") from error
    except Exception as error:
        raise CheckpointCorruptError(
            f"{path}: not the metadata of DCP: {type(error).__name__}: {str(error)[:200]}"
        ) from error
    entries = getattr(metadata, "state_dict_metadata", None)
    if not isinstance(metadata, Metadata) or not isinstance(entries, dict):
        raise CheckpointCorruptError(f"{path}: not the metadata of DCP")
    return metadata


def write_stock(source: Source, folder: Path, shard_bytes: int, run: Run) -> None:
    """Write a checkpoint of stock DCP to the directory ``folder``, each tensor as one chunk."""
    places: _Places = {}

    def write(number: int, names: Iterable[str], done: Done) -> None:
        path, begin = folder / f"__{number}_0.distcp", 0

        def place(index: MetadataIndex) -> None:  # of what was written since the last call
            nonlocal begin
            end = stream.tell()
            places[index] = _StorageInfo(path.name, begin, end - begin)
            begin = end

        with local.explained("writing", path, source.nbytes), path.open("xb") as stream:
            for name in () if number else source.objects:
                stream.write(source.objects[name]())
                place(MetadataIndex(name))
            for name, tensor in source.each(names):
                save_to(own(tensor), stream)
                place(MetadataIndex(name, _begin(tensor)))
                done(tensor.nbytes)
                del tensor
            stream.flush()
            os.fsync(stream.fileno())

    parts = enumerate(source.groups(source.tensors, shard_bytes))
    run([partial(write, number, names) for number, names in parts])
    metadata = _metadata(source, places)
    metadata.planner_data = key_paths.as_dcp_has_them(metadata.planner_data)
    write_file(folder / local.METADATA_NAME, [pickle.dumps(metadata)])
