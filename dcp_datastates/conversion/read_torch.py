"""Reads files of ``torch.save``, without their tensors' bytes: a tensor is read where it lies in the file.

torch makes fake tensors of such a file, which know where their bytes are (``torch.serialization``).
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dcp_datastates.conversion.files import Array, opened, read_parts, stream_of
from dcp_datastates.conversion.source import Source, TensorInfo, Want, unsafe
from dcp_datastates.errors import (
    CheckpointCorruptError,
    DataStatesError,
    ForeignCheckpointError,
    IncompatibleStateError,
    StorageError,
    UnsupportedStateError,
    UnsupportedTensorError,
)
from dcp_datastates.format.key_paths import EMPTY, KeyPath, name_of, part_of
from dcp_datastates.storage.object_path import Location

__all__ = [
    "TorchSource",
    "array_of",
    "is_legacy_pickle",
    "is_torch_file",
    "leaves",
    "load_fake",
    "records_in",
]


class TorchSource(Source):
    """A file of ``torch.save``: a dict of tensors and objects, nested to any depth."""

    format = "torch.save"

    def __init__(self, path: Location, allow_objects: bool) -> None:
        self.path = path
        with opened(path) as file:
            state, records = load_fake(stream_of(file), str(path), allow_objects)
        if not isinstance(state, Mapping):
            kind = "Tensor" if isinstance(state, torch.Tensor) else type(state).__name__
            raise IncompatibleStateError(
                f"{path} holds a {kind}; only a dict with strings as keys can be converted"
            )
        self._arrays: dict[str, Array] = {}
        self.refusals = {}
        self._values: dict[str, Any] = {}
        paths: dict[str, KeyPath] = {}
        shapes: dict[str, TensorInfo] = {}
        for key_path, value in leaves(state):
            name = name_of(key_path)
            if not name:
                raise IncompatibleStateError(
                    f"{path} has a value under the empty key ''; load it with torch.load, name the value, and save it "
                    f"again"
                )
            if name in paths:
                raise IncompatibleStateError(
                    f"{path} has two values with the name {name!r}: at {paths[name]} and {key_path}"
                )
            paths[name] = key_path
            if key_path[-1] == EMPTY:
                continue
            if isinstance(value, torch.Tensor):
                shapes[name] = TensorInfo(value.dtype, tuple(value.shape))
                try:
                    self._arrays[name] = array_of(value, records, path, 0, name)
                except UnsupportedTensorError as error:
                    self.refusals[name] = error
            else:
                self._values[name] = value
        self.paths = paths
        self.tensors = shapes
        self.objects = self._values

    def fill(self, wants: Sequence[Want]) -> None:
        """See :class:`Source`."""
        read_parts((self._arrays[want.name], part) for want in wants for part in self.parts(want))

    def object_bytes(self, name: str) -> bytes:
        """See :class:`Source`."""
        buffer = io.BytesIO()
        try:
            torch.save(self._values[name], buffer)
        except Exception as error:
            raise UnsupportedStateError(
                f"{self.path}: object {name!r} cannot be stored: {type(error).__name__}: {error}"
            ) from error
        return buffer.getvalue()


def is_torch_file(first: bytes) -> bool:
    """Whether a file with these ``first`` bytes begins like one of ``torch.save``."""
    return first.startswith(b"PK\x03\x04")


def is_legacy_pickle(first: bytes) -> bool:
    """Whether a file with these ``first`` bytes begins like a pickle: torch wrote such files before 1.6."""
    return len(first) >= 2 and first[0] == 0x80 and 2 <= first[1] <= pickle.HIGHEST_PROTOCOL


Records = Mapping[int, int]
"""The storages in an archive: the size in bytes of each, by its offset."""


def load_fake(file: BinaryIO, said: str, allow_objects: bool) -> tuple[Any, Records]:
    """The value in a file of ``torch.save``, with fake tensors, and what :func:`array_of` needs to locate them.

    Raises :class:`UnsafeObjectError`, :class:`CheckpointCorruptError` (``said`` names the file) or
    :class:`StorageError`.
    """
    try:
        records = records_in(file, said)
        with FakeTensorMode():
            return torch.load(file, map_location="cpu", weights_only=not allow_objects), records
    except DataStatesError:
        raise
    except pickle.UnpicklingError as error:
        if allow_objects:
            raise CheckpointCorruptError(f"{said}: not a readable pickle: {error}") from error
        raise unsafe(
            said, error, "load it with torch.load, make its values plain, save it again"
        ) from error
    except NotImplementedError as error:
        if "Quantized" not in str(error):
            raise
        raise UnsupportedTensorError(
            f"{said} has quantized tensors, whose bytes alone do not say their values; load it with torch.load, take "
            f"dequantize() of them or leave them out, and save it again"
        ) from error
    except OSError as error:
        raise StorageError(error.errno, f"reading {said} failed: {error.strerror}", said) from error
    except Exception as error:
        raise CheckpointCorruptError(
            f"{said}: torch cannot read it: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def records_in(file: BinaryIO, said: str) -> Records:
    """The storages that are not compressed. Raises :class:`IncompatibleStateError` for another byte order: torch swaps
    the bytes of tensors in memory; of fake tensors it has none, and crashes.
    """
    found = {}
    with zipfile.ZipFile(file) as archive:
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            raise ForeignCheckpointError(
                f"{said} is a TorchScript archive, which is a program; convert a file of its weights: "
                f"torch.save(torch.jit.load(PATH).state_dict(), FILE)"
            )
        for entry in archive.infolist():
            if entry.filename.endswith("/byteorder"):
                if archive.read(entry) != sys.byteorder.encode():
                    raise IncompatibleStateError(
                        f"{said} has another byte order than this machine; load it with torch.load, and save it again"
                    )
            elif "/data/" in entry.filename:
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise _packed(said)
                file.seek(entry.header_offset + 26)
                name, extra = struct.unpack("<HH", file.read(4))  # lengths of what follows
                found[entry.header_offset + 30 + name + extra] = entry.file_size
    file.seek(0)
    return found


def array_of(tensor: torch.Tensor, records: Records, path: Location, base: int, name: str) -> Array:
    """Where the bytes of a fake tensor lie, in an archive that begins at byte ``base`` of ``path``.

    torch may compute a place from how it writes archives. So the archive must say the same.

    Raises :class:`UnsupportedTensorError` for a tensor without dense bytes of its own, and
    :class:`IncompatibleStateError` for one that lies elsewhere.
    """
    plain = tensor.detach()
    if type(plain) is not FakeTensor or plain.layout is not torch.strided or plain.is_quantized:
        raise UnsupportedTensorError(
            f"{path}: {name!r} is a {type(tensor).__name__} of layout {tensor.layout}; only plain dense tensors "
            f"can be converted: exclude={name!r} (--exclude) leaves it out"
        )
    at = getattr(plain.untyped_storage(), "_checkpoint_offset", None)
    if at is None or plain.is_conj() or plain.is_neg():
        raise UnsupportedTensorError(
            f"{path}: {name!r} is a view with conjugate or negative values, or has no bytes of its own in the file; "
            f"exclude={name!r} (--exclude) leaves it out, and tensor.resolve_conj().resolve_neg() before torch.save "
            f"stores it"
        )
    if plain.numel() and plain.untyped_storage().nbytes() != records.get(int(at)):
        raise _packed(str(path))
    itemsize = plain.dtype.itemsize
    place = base + int(at) + int(plain.storage_offset()) * itemsize
    return Array(path, place, plain.dtype, tuple(plain.shape), tuple(plain.stride()))


def _packed(said: str) -> IncompatibleStateError:
    return IncompatibleStateError(
        f"{said}: the tensors' bytes are not where torch writes them: another program has packed the archive; load it "
        f"with torch.load, and save it again"
    )


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """The values of a nested state, as DCP flattens one: dicts are containers, and lists with tensors or dicts in them
    (tuples only with tensors); all else is a value. An empty dict has a path that says so (``key_paths.py``).
    """
    items: Iterable[tuple[Any, Any]] | None = None
    if isinstance(value, Mapping):
        if path and not value:
            path = (*path, EMPTY)
        else:
            items = ((part_of(key), each) for key, each in value.items())
    elif isinstance(value, (list, tuple)) and _is_container(value):
        items = enumerate(value)
    if items is None:
        yield path, value
        return
    for key, each in items:
        yield from leaves(each, (*path, key))


def _is_container(value: Any) -> bool:
    """Whether a list or tuple is taken apart. A tuple is so only for its tensors' sake, as it comes back as a list."""
    if isinstance(value, tuple):
        return any(map(_has_tensors, value))
    return isinstance(value, list) and any(
        isinstance(each, (torch.Tensor, Mapping)) or _is_container(each) for each in value
    )


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (list, tuple)) and any(map(_has_tensors, value))
    )
