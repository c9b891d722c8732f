"""What is converted or compared: a flat state of tensors and objects, each read as a whole when it is asked for.

So memory depends on the largest tensor, not on the checkpoint.
"""

from __future__ import annotations

import abc
import errno
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
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

from dcp_datastates.conversion.files import loaded
from dcp_datastates.errors import ConfigurationError, DataStatesError, StorageError
from dcp_datastates.format.key_paths import KeyPath, empties, nested, with_types
from dcp_datastates.format.metadata import DCP_VERSION
from dcp_datastates.format.stored_names import renamed_path
from dcp_datastates.storage.object_path import Location
from dcp_datastates.text import size

PIECE_BYTES: Final = 4 << 20
"""What is read of small tensors at a time."""


class Source(abc.ABC):
    """A checkpoint of any format. Any thread may call its methods."""

    path: Location
    format: str
    """The format, for people."""
    tensors: Mapping[str, torch.Tensor]
    """Tensors without data, on the device "meta", in the order of the source."""
    objects: Collection[str] = ()
    """The names of objects, in the order of the source."""
    refusals: Mapping[str, DataStatesError] = {}
    """For each of the tensors that cannot be read as it is stored, why."""
    paths: Mapping[str, KeyPath]
    """Where each value and each empty dict lies in the nested state."""

    def names(self) -> list[str]:
        """The names of all values."""
        return [*self.tensors, *self.objects]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in self.tensors.values())

    @abc.abstractmethod
    def read(self, names: Sequence[str]) -> list[torch.Tensor]:
        """The tensors of these names, on the host. They may lie in a mapped file: the caller changes nothing in them.

        Raises :class:`CheckpointCorruptError`, :class:`StorageError` and others of this package.
        """

    def memory_for(self, name: str) -> torch.Tensor:
        """Memory for a tensor, on the host. Raises :class:`StorageError` if there is not enough."""
        try:
            return torch.empty_like(self.tensors[name], device="cpu")
        except RuntimeError as error:
            nbytes = size(self.tensors[name].nbytes)
            text = f"there is no memory for {name!r}, which has {nbytes}"
            raise StorageError(errno.ENOMEM, text, str(self.path)) from error

    @abc.abstractmethod
    def object_bytes(self, name: str) -> bytes:
        """An object, as ``torch.save`` has written it."""

    def value(self, name: str, allow_objects: bool) -> Any:
        """An object as a Python value. Raises as :func:`~dcp_datastates.conversion.files.loaded`."""
        data = io.BytesIO(self.object_bytes(name))
        return loaded(data, f"{self.path}: object {name!r}", allow_objects)

    def nested(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The nested state of ``values``, by names: all tensors and objects."""
        return nested(values, self.paths)

    def index_of(self, name: str) -> MetadataIndex:
        """How DCP calls a tensor, of which there is one chunk, or an object."""
        shaped = self.tensors.get(name)
        return MetadataIndex(name, None if shaped is None else torch.Size([0] * shaped.ndim))

    def metadata(
        self, places: dict[MetadataIndex, _StorageInfo], storage_meta: StorageMeta
    ) -> Metadata:
        """What DCP says of the state. Each tensor is one chunk."""
        entries: dict[str, STORAGE_TYPES] = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=each.dtype),
                each.shape,
                [ChunkStorageMetadata(torch.Size([0] * each.ndim), each.shape)],
            )
            for name, each in self.tensors.items()
        }
        entries.update((name, BytesStorageMetadata()) for name in self.objects)
        return Metadata(entries, dict(self.paths), places, storage_meta, DCP_VERSION)

    def groups(self, names: Iterable[str], most: int) -> list[list[str]]:
        """The names of tensors in groups, in order: of each as many as fit into ``most`` bytes, or one. There is at
        least one group, which may be empty.
        """
        found: list[list[str]] = [[]]
        taken = 0
        for name in names:
            nbytes = self.tensors[name].nbytes
            if taken and taken + nbytes > most:
                found.append([])
                taken = 0
            found[-1].append(name)
            taken += nbytes
        return found


class Selected(Source):
    """Values of another source, under other names."""

    def __init__(
        self, source: Source, old_of: Mapping[str, str], dtype: torch.dtype | None = None
    ) -> None:
        """``old_of``: the name in ``source`` of each value; ``dtype``: of floating-point tensors; None: as they are.

        Raises :class:`ConfigurationError` for a dtype to which torch cannot convert.
        """
        self.path, self.format = source.path, source.format
        self._source, self._old_of = source, old_of
        given = {name: source.tensors.get(old) for name, old in old_of.items()}
        self.tensors = {
            name: _cast(each, dtype) for name, each in given.items() if each is not None
        }
        self.objects = dict.fromkeys(name for name, old in old_of.items() if old in source.objects)
        self.paths = {
            name: renamed_path(source.paths[old], old, name) for name, old in old_of.items()
        }

    def read(self, names: Sequence[str]) -> list[torch.Tensor]:
        """See :class:`Source`."""
        found = self._source.read([self._old_of[name] for name in names])
        return [each.to(self.tensors[name].dtype) for name, each in zip(names, found, strict=True)]

    def object_bytes(self, name: str) -> bytes:
        """See :class:`Source`."""
        return self._source.object_bytes(self._old_of[name])


def _cast(shaped: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None or not shaped.dtype.is_floating_point or shaped.dtype == dtype:
        return shaped
    try:
        torch.empty(1, dtype=shaped.dtype, device="cpu").to(dtype)
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigurationError(
            f"dtype={dtype}: torch cannot convert {shaped.dtype} to it ({str(error).splitlines()[0]}); exclude such "
            f"tensors"
        ) from error
    return shape_of(dtype, shaped.shape)


def paths_of(names: Iterable[str], stored: Any) -> dict[str, KeyPath]:
    """The paths of values called ``names`` and of empty dicts, by the ``stored`` paths in metadata. If that of a value
    is missing or malformed, the value lies under its name.
    """
    known = with_types(stored)
    well_formed = {
        name: path
        for name, path in (known.items() if isinstance(known, dict) else ())
        if type(path) is tuple and path and set(map(type, path)) <= {str, int, tuple}
    }
    of_values = {name: well_formed.get(name, (name,)) for name in names}
    return of_values | {
        name: well_formed[name] for name in empties(well_formed) if name not in of_values
    }


def shape_of(dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor on the host, in row-major order: its own memory, if they lie so."""
    if not tensor.numel():
        return memoryview(b"")
    data: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(data)
