"""Checkpoints of stock DCP (``FileSystemWriter``): chunks that ``torch.save`` has written, one after another in files,
and metadata that are a pickle.

The metadata are unpickled with the few classes that stock DCP writes; a pickle that needs others is refused, unless the
user trusts it.
"""

from __future__ import annotations

import io
import os
import pickle
import types
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_datastates.conversion.destination import Output, write_small_file
from dcp_datastates.conversion.source import (
    PIECE_BYTES,
    Source,
    contents_of,
    loaded,
    opened,
    part_of,
    read_whole,
)
from dcp_datastates.conversion.torch_file import own, save_to
from dcp_datastates.errors import CheckpointCorruptError, IncompatibleStateError, StorageError
from dcp_datastates.format.key_paths import as_dcp_has_them, check_paths
from dcp_datastates.format.metadata import DCP_VERSION
from dcp_datastates.format.metadata_check import check_covered, validate
from dcp_datastates.format.metadata_objects import catalog_of
from dcp_datastates.io.unpickling import BoundedUnpickler, unsafe
from dcp_datastates.process.work import Done
from dcp_datastates.storage import local
from dcp_datastates.storage.object_path import Location

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


class StockSource(Source):
    """A checkpoint of stock DCP."""

    def __init__(self, path: Location, allow_objects: bool) -> None:
        metadata = _read_metadata(path / local.METADATA_NAME, allow_objects)
        try:
            catalog = catalog_of(metadata)
            wrong = validate(catalog, filled=False)
            check_paths(metadata.planner_data, catalog.names)
            contents = contents_of(catalog)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointCorruptError(f"{path}: the metadata are malformed: {error}") from error
        if wrong:
            raise CheckpointCorruptError(f"{path}: {wrong[0]}")
        super().__init__(path, "stock DCP", *contents)
        self._entries = metadata.state_dict_metadata
        self._places = metadata.storage_data or {}

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
        stored = self._stored(MetadataIndex(name, chunk.offsets))
        found = loaded(io.BytesIO(stored), said, allow_objects=False)
        dtype, sizes = self.tensors[name].dtype, chunk.sizes
        if not isinstance(found, torch.Tensor) or (found.dtype, found.shape) != (dtype, sizes):
            kind = type(found).__name__
            if isinstance(found, torch.Tensor):
                kind = f"{found.dtype} {tuple(found.shape)}"
            raise CheckpointCorruptError(
                f"{said} is {kind}, and the metadata say {dtype} {tuple(sizes)}"
            )
        if found.nbytes > len(stored):  # all of whose elements are one
            raise CheckpointCorruptError(
                f"{said} has {found.nbytes} bytes, of which {len(stored)} are stored"
            )
        return found

    def object_bytes(self, name: str) -> bytes:
        """See :class:`Source`."""
        return self._stored(MetadataIndex(name))

    def _stored(self, index: MetadataIndex) -> bytes:
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
        begin, length = info.offset, info.length
        with opened(self.path / relative) as file:
            are_numbers = type(begin) is type(length) is int and begin >= 0 and length >= 0
            if not are_numbers or begin + length > file.nbytes:
                raise CheckpointCorruptError(
                    f"{self.path}: {index.fqn!r} is said to lie at {begin!r} with {length!r} bytes in {relative}, "
                    f"which is cut short, or the metadata are damaged"
                )
            return part_of(file, begin, length)


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
    kind = pickle.Unpickler if allow_objects else _Unpickler
    try:
        metadata = kind(io.BytesIO(read_whole(path))).load()
    except StorageError:
        raise
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


def stock_output(source: Source, folder: Path, shard_bytes: int) -> Output:
    """A checkpoint of stock DCP, each tensor as one chunk."""
    places: dict[MetadataIndex, _StorageInfo] = {}

    def write(number: int, names: Iterable[str], done: Done) -> None:
        path = folder / f"__{number}_0.distcp"
        with local.explained("writing", path, source.nbytes), path.open("xb") as stream:
            begin = 0

            def place(name: str) -> None:  # what was written since the last call
                nonlocal begin
                end = stream.tell()
                shaped = source.tensors.get(name)
                offset = None if shaped is None else torch.Size([0] * shaped.ndim)
                index = MetadataIndex(name, offset)
                places[index] = _StorageInfo(path.name, begin, end - begin)
                begin = end

            def save(group: list[str]) -> None:  # a function: when it ends, the tensors are freed
                for name, tensor in zip(group, source.read(group), strict=True):
                    save_to(own(tensor), stream)
                    place(name)
                    done(tensor.nbytes)

            for name in () if number else source.objects:
                stream.write(source.object_bytes(name))
                place(name)
            for group in source.groups(names, PIECE_BYTES):
                save(group)
            stream.flush()
            os.fsync(stream.fileno())

    def finish() -> None:
        entries: dict[str, STORAGE_TYPES] = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=each.dtype),
                each.shape,
                [ChunkStorageMetadata(torch.Size([0] * each.ndim), each.shape)],
            )
            for name, each in source.tensors.items()
        }
        entries.update((name, BytesStorageMetadata()) for name in source.objects)
        paths = as_dcp_has_them(dict(source.paths))
        metadata = Metadata(entries, paths, places, StorageMeta(), DCP_VERSION)
        write_small_file(folder / local.METADATA_NAME, pickle.dumps(metadata))

    parts = enumerate(source.groups(source.tensors, shard_bytes))
    return Output([partial(write, number, names) for number, names in parts], finish)
