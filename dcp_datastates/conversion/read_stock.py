"""Reads checkpoints of stock DCP (``FileSystemWriter``), without running code from them.

The metadata of such a checkpoint are a pickle. It is read with the few classes that stock DCP writes; a pickle that
needs others is refused, unless the user trusts it.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
import types
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from dcp_datastates.conversion.files import Array, Files
from dcp_datastates.conversion.read_torch import array_of, load_fake
from dcp_datastates.conversion.source import DCPSource, Want, parts, unsafe
from dcp_datastates.errors import (
    CheckpointCorruptError,
    IncompatibleStateError,
    StorageError,
)
from dcp_datastates.format.metadata_columns import catalog_of
from dcp_datastates.format.validate import validate
from dcp_datastates.storage import local

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

    def __init__(self, path: Path, allow_objects: bool) -> None:
        self.path = path
        metadata = _read_metadata(path / local.METADATA_NAME, allow_objects)
        self._files = Files()
        self._lock = threading.Lock()  # guards _arrays
        self._arrays: dict[MetadataIndex, Array] = {}
        try:
            self._describe(metadata)
            wrong = validate(catalog_of(metadata), filled=False, thorough=False)
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointCorruptError(f"{path}: the metadata are malformed: {error}") from error
        if wrong:
            raise CheckpointCorruptError(f"{path}: {wrong[0]}")

    def fill(self, wants: Sequence[Want]) -> None:
        """See :class:`Source`."""
        for want in wants:
            chunks = self._chunks(want.name)
            for part in parts(self.tensors[want.name].shape, chunks, want):
                array = self._array(want.name, chunks[part.chunk])
                array.read(self._files, part.offsets, part.sizes, part.into)

    def object_bytes(self, name: str) -> bytes:
        """See :class:`Source`."""
        info = self._info(MetadataIndex(name))
        data = bytearray(info.length)
        self._files.read(self._file(info), info.offset, memoryview(data))
        return bytes(data)

    def close(self) -> None:
        """See :class:`Source`."""
        self._files.close()

    def _array(self, name: str, chunk: ChunkStorageMetadata) -> Array:
        """Where a chunk's elements lie: its archive says so."""
        index, sizes = MetadataIndex(name, chunk.offsets), tuple(chunk.sizes)
        with self._lock:
            if index not in self._arrays:
                info = self._info(index)
                file = self._file(info)
                with _Slice(self._files, file, info) as archive:
                    found, records = load_fake(archive, f"{file} at byte {info.offset}", False)  # type: ignore[arg-type]
                if not isinstance(found, torch.Tensor):
                    raise CheckpointCorruptError(f"{file}: the chunk of {name!r} is no tensor")
                array = array_of(found, records, file, info.offset, name)
                if array.shape != sizes or array.dtype != self.tensors[name].dtype:
                    raise CheckpointCorruptError(
                        f"{file}: a chunk of {name!r} is {array.dtype} {array.shape}, and the metadata say "
                        f"{self.tensors[name].dtype} {sizes}"
                    )
                self._arrays[index] = array
            return self._arrays[index]

    def _info(self, index: MetadataIndex) -> _StorageInfo:
        info = (self._metadata.storage_data or {}).get(index)
        if not isinstance(info, _StorageInfo):
            raise CheckpointCorruptError(
                f"{self.path}: the metadata do not say where {index.fqn!r} is stored"
            )
        if not (
            type(info.offset) is type(info.length) is int and info.offset >= 0 and info.length >= 0
        ) or (info.offset + info.length > self._files.nbytes(self._file(info))):
            raise CheckpointCorruptError(
                f"{self.path}: {index.fqn!r} is said to lie at {info.offset!r} with {info.length!r} bytes in "
                f"{info.relative_path}, which is cut short, or the metadata are damaged"
            )
        extensions = getattr(info, "transform_descriptors", None)
        if extensions:
            raise IncompatibleStateError(
                f"{self.path}: {index.fqn!r} was written with the extensions {list(extensions)}; load it with DCP, and "
                f"save it without them"
            )
        return info

    def _file(self, info: _StorageInfo) -> Path:
        relative = Path(str(info.relative_path))
        if relative.is_absolute() or ".." in relative.parts:
            raise CheckpointCorruptError(
                f"{self.path}: the metadata name the file {str(relative)!r}, which is outside of the checkpoint"
            )
        return self.path / relative


class _Slice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, files: Files, path: Path, info: _StorageInfo) -> None:
        super().__init__()
        self._files, self._path = files, path
        self._offset, self._length, self._at = info.offset, info.length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        self._files.read(self._path, self._offset + self._at, view[:count])
        self._at += count
        return count


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


def _read_metadata(path: Path, allow_objects: bool) -> Metadata:
    kind = pickle.Unpickler if allow_objects else _Unpickler
    try:
        with (
            local.explained("reading", path),
            os.fdopen(local.open_regular(path), "rb") as file,
        ):
            metadata = kind(file).load()
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
