"""Reads checkpoints of stock DCP (``FileSystemWriter``), without running code from them.

The metadata of such a checkpoint are a pickle. It is read with the few classes that stock DCP writes; a pickle that
needs others is refused, unless the user trusts it.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import types
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from dcp_datastates.conversion.files import Array, opened, read_parts, stream_of
from dcp_datastates.conversion.read_torch import array_of, load_fake
from dcp_datastates.conversion.source import DCPSource, Want, unsafe
from dcp_datastates.errors import (
    CheckpointCorruptError,
    IncompatibleStateError,
    StorageError,
)
from dcp_datastates.format.metadata_columns import catalog_of
from dcp_datastates.format.validate import validate
from dcp_datastates.storage import local
from dcp_datastates.storage.object_path import Location

__all__ = ["StockSource"]

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


class StockSource(DCPSource):
    """A checkpoint of stock DCP."""

    format = "stock DCP"

    def __init__(self, path: Location, allow_objects: bool) -> None:
        self.path = path
        metadata = _read_metadata(path / local.METADATA_NAME, allow_objects)
        self._arrays: dict[MetadataIndex, Array] = {}
        try:
            self._describe(metadata)
            wrong = validate(catalog_of(metadata), filled=False)
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointCorruptError(f"{path}: the metadata are malformed: {error}") from error
        if wrong:
            raise CheckpointCorruptError(f"{path}: {wrong[0]}")

    def fill(self, wants: Sequence[Want]) -> None:
        """See :class:`Source`."""
        read_parts(
            (self._array(want.name, self.chunks(want.name)[part.chunk]), part)
            for want in wants
            for part in self.parts(want)
        )

    def object_bytes(self, name: str) -> bytes:
        """See :class:`Source`."""
        with self._stored(MetadataIndex(name)) as stored:
            return stored.stream.read()

    def _array(self, name: str, chunk: ChunkStorageMetadata) -> Array:
        """Where a chunk's elements lie: its archive says so."""
        index, sizes = MetadataIndex(name, chunk.offsets), tuple(chunk.sizes)
        if (known := self._arrays.get(index)) is not None:
            return known
        with self._stored(index) as stored:
            file, begin = stored.path, stored.begin
            found, records = load_fake(stored.stream, f"{file} at byte {begin}", False)
        if not isinstance(found, torch.Tensor):
            raise CheckpointCorruptError(f"{file}: the chunk of {name!r} is no tensor")
        array = array_of(found, records, file, begin, name)
        if array.shape != sizes or array.dtype != self.tensors[name].dtype:
            raise CheckpointCorruptError(
                f"{file}: a chunk of {name!r} is {array.dtype} {array.shape}, and the metadata say "
                f"{self.tensors[name].dtype} {sizes}"
            )
        self._arrays[index] = array
        return array

    @contextlib.contextmanager
    def _stored(self, index: MetadataIndex) -> Iterator[_Stored]:
        """What is stored under ``index``."""
        info = (self._metadata.storage_data or {}).get(index)
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
        path, begin, length = self.path / relative, info.offset, info.length
        with opened(path) as file:
            if (
                not (type(begin) is type(length) is int and begin >= 0 and length >= 0)
                or begin + length > file.nbytes
            ):
                raise CheckpointCorruptError(
                    f"{self.path}: {index.fqn!r} is said to lie at {begin!r} with {length!r} bytes in "
                    f"{info.relative_path}, which is cut short, or the metadata are damaged"
                )
            yield _Stored(path, begin, stream_of(file, begin, length))


class _Stored(NamedTuple):
    """What is stored under a name."""

    path: Location
    begin: int
    """Where it begins in the file, in bytes."""
    stream: io.BufferedReader


class _Unpickler(pickle._Unpickler):  # the one in C cannot check what it builds
    """Unpickles what stock DCP writes, and nothing else."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

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
        with opened(path) as file:
            metadata = kind(stream_of(file)).load()
    except StorageError:
        raise
    except pickle.UnpicklingError as error:
        if "Unsupported global" in str(error):
            raise unsafe(str(path), error) from error
        raise CheckpointCorruptError(f"{path}: {error}") from error
    except Exception as error:
        raise CheckpointCorruptError(
            f"{path}: not the metadata of DCP: {type(error).__name__}: {str(error)[:200]}"
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointCorruptError(f"{path}: not the metadata of DCP")
    return metadata
