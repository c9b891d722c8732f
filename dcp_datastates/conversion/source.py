"""What is converted or compared: a flat state of tensors and objects.

Tensors are mapped from files, or read when they are asked for. So memory depends on the largest tensor, not on the
checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import io
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
    StorageError,
    UnsafeObjectError,
    UnsupportedStateError,
)
from dcp_datastates.format.key_paths import KeyPath, empties, nested, path_of, with_types
from dcp_datastates.format.metadata_table import Catalog
from dcp_datastates.format.stored_names import renamed_path
from dcp_datastates.io.unpickling import unpickled
from dcp_datastates.loading.stored import shapes_of
from dcp_datastates.storage.local import explained
from dcp_datastates.storage.object_path import Location
from dcp_datastates.storage.readable import ReadableFile, open_readable
from dcp_datastates.text import size

PIECE_BYTES: Final = 4 << 20
"""What is read of small tensors at a time."""


@dataclass(eq=False)
class Source:
    """A checkpoint of any format, whose tensors are mapped; subclasses read them. Any thread may call its methods."""

    path: Location
    format: str
    """The format, for people."""
    tensors: Mapping[str, torch.Tensor]
    """In their order. Those of a subclass have no data: they are on the device "meta"."""
    objects: Mapping[str, Any]
    """In their order. Those of a subclass are None."""
    paths: Mapping[str, KeyPath]
    """Where each value and each empty dict lies in the nested state."""

    def names(self) -> list[str]:
        """The names of all values."""
        return [*self.tensors, *self.objects]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in self.tensors.values())

    def read(self, names: Sequence[str]) -> list[torch.Tensor]:
        """The tensors of these names, on the host. They may lie in a mapped file: the caller changes nothing in them.

        Raises :class:`CheckpointCorruptError`, :class:`StorageError` and others of this package.
        """
        return [self.tensors[name] for name in names]

    def object_bytes(self, name: str) -> bytes:
        """An object, as ``torch.save`` has written it."""
        buffer = io.BytesIO()
        try:
            torch.save(self.objects[name], buffer)
        except Exception as error:
            raise UnsupportedStateError(
                f"{self.path}: object {name!r} cannot be stored: {type(error).__name__}: {error}"
            ) from error
        return buffer.getvalue()

    def value(self, name: str, allow_objects: bool) -> Any:
        """An object as a Python value. Raises as :func:`loaded`."""
        data = io.BytesIO(self.object_bytes(name))
        return loaded(data, f"{self.path}: object {name!r}", allow_objects)

    def memory_for(self, name: str) -> torch.Tensor:
        """Memory for a tensor, on the host. Raises :class:`StorageError` if there is not enough."""
        try:
            return torch.empty_like(self.tensors[name], device="cpu")
        except RuntimeError as error:
            nbytes = size(self.tensors[name].nbytes)
            text = f"there is no memory for {name!r}, which has {nbytes}"
            raise StorageError(errno.ENOMEM, text, str(self.path)) from error

    def nested(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The nested state of ``values``, by names: all tensors and objects."""
        return nested(values, self.paths)

    def catalog(self) -> Catalog:
        """The names and tensors in columns, in the order of :meth:`names`. Each tensor is one chunk."""
        tensors = list(self.tensors.values())
        number_of = {dtype: n for n, dtype in enumerate(dict.fromkeys(t.dtype for t in tensors))}
        ndims, shapes = shapes_of(tensors)
        no_dimensions = np.zeros(len(self.objects), np.int64)
        return Catalog(
            names=tuple(self.names()),
            table=tuple(TensorProperties(dtype=dtype) for dtype in number_of),
            properties=np.array(
                [*(number_of[each.dtype] for each in tensors), *(-1 for _ in self.objects)],
                np.int64,
            ),
            ndims=np.concatenate([ndims, no_dimensions]),
            shapes=shapes,
            counts=np.concatenate([np.ones_like(ndims), no_dimensions]),
            offsets=np.zeros_like(shapes),
            sizes=shapes,
            mappings=dict(self.paths),
        )

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
    """Values of another source, under other names.

    ``old_of``: the name in ``source`` of each value; ``dtype``: of floating-point tensors; None: as they are. Raises
    :class:`ConfigurationError` for a dtype to which torch cannot convert.
    """

    def __init__(
        self, source: Source, old_of: Mapping[str, str], dtype: torch.dtype | None = None
    ) -> None:
        tensors, objects = source.tensors, source.objects
        super().__init__(
            source.path,
            source.format,
            {
                name: _described(tensors[old], dtype)
                for name, old in old_of.items()
                if old in tensors
            },
            dict.fromkeys(name for name, old in old_of.items() if old in objects),
            {name: renamed_path(source.paths[old], old, name) for name, old in old_of.items()},
        )
        self._source, self._old_of = source, old_of

    def read(self, names: Sequence[str]) -> list[torch.Tensor]:
        """See :class:`Source`."""
        found = self._source.read([self._old_of[name] for name in names])
        return [each.to(self.tensors[name].dtype) for name, each in zip(names, found, strict=True)]

    def object_bytes(self, name: str) -> bytes:
        """See :class:`Source`."""
        return self._source.object_bytes(self._old_of[name])


def _described(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor of the same shape and of ``dtype``, if both are of floating-point numbers."""
    if dtype is None or not tensor.dtype.is_floating_point or tensor.dtype == dtype:
        return tensor
    try:
        torch.empty(1, dtype=tensor.dtype, device="cpu").to(dtype)
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigurationError(
            f"dtype={dtype}: torch cannot convert {tensor.dtype} to it ({str(error).splitlines()[0]}); exclude such "
            f"tensors"
        ) from error
    return shape_of(dtype, tensor.shape)


def paths_of(names: Iterable[str], stored: Any) -> dict[str, KeyPath]:
    """The paths of values called ``names`` and of empty dicts, by the ``stored`` paths in checked metadata."""
    known = with_types(stored)
    found = {name: path_of(name, known) for name in names}
    if isinstance(known, dict):
        found.update((name, known[name]) for name in empties(known) if name not in found)
    return found


def shape_of(dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor on the host, in row-major order: its own memory, if they lie so."""
    if not tensor.numel():
        return memoryview(b"")
    data: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(data)


# ---- files of other programs, in the file system or in a store ---------------------------------------


_REQUEST_BYTES: Final = 16 << 20
"""What is read of an object by one request."""


@contextlib.contextmanager
def opened(path: Location) -> Iterator[ReadableFile]:
    """The open file at ``path``. A read that fails in the block raises :class:`StorageError`.

    Raises :class:`CheckpointNotFoundError` or :class:`StorageError`.
    """
    try:
        file = open_readable(path)
    except OSError as error:
        kind = CheckpointNotFoundError if error.errno == errno.ENOENT else StorageError
        raise kind(error.errno, f"opening {path} failed: {error.strerror}", str(path)) from error
    with contextlib.closing(file), explained("reading", path):
        yield file


def part_of(file: ReadableFile, begin: int, nbytes: int) -> bytearray:
    """``nbytes`` of an open file from ``begin`` on; fewer at its end."""
    data = bytearray(max(0, min(nbytes, file.nbytes - begin)))
    count = 0
    with memoryview(data) as view:
        for at in range(0, len(data), _REQUEST_BYTES):
            count += file.read_at(begin + at, view[at : at + _REQUEST_BYTES])
    del data[count:]
    return data


def read_whole(path: Location, at_most: int | None = None) -> bytes:
    """The bytes of a file, or its first ``at_most``. Raises as :func:`opened`."""
    with opened(path) as file:
        return bytes(part_of(file, 0, file.nbytes if at_most is None else at_most))


@contextlib.contextmanager
def local_file(path: Location) -> Iterator[Path]:
    """A file with the bytes at ``path``: of an object in a store, a copy in the directory for temporary files, which is
    removed with the context; a mapping of it stays. Raises as :func:`opened`.
    """
    if isinstance(path, Path):
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="dcp_datastates-") as copy:
        with opened(path) as file, explained("copying to a temporary file", copy.name, file.nbytes):
            for begin in range(0, file.nbytes, _REQUEST_BYTES):
                copy.write(part_of(file, begin, _REQUEST_BYTES))
            copy.flush()
        yield Path(copy.name)


def mapped(path: Location) -> torch.UntypedStorage:
    """The bytes of a file, mapped. Raises as :func:`opened`."""
    with local_file(path) as local, opened(local) as file:
        try:
            whole = torch.from_file(str(local), size=file.nbytes, dtype=torch.uint8, device="cpu")
            return whole.untyped_storage()
        except RuntimeError as error:
            raise StorageError(errno.EIO, f"mapping it failed: {error}", str(path)) from error


def loaded(
    file: str | IO[bytes],
    said: str,
    allow_objects: bool,
    way_out: str = "exclude it",
    mapped: bool = False,
) -> Any:
    """:func:`~dcp_datastates.io.unpickling.unpickled`, with tensors on the CPU.

    Raises :class:`UnsafeObjectError` as that; :class:`CheckpointCorruptError` or :class:`StorageError`.
    """
    try:
        return unpickled(file, said, allow_objects, device="cpu", way_out=way_out, mapped=mapped)
    except UnsafeObjectError:
        raise
    except OSError as error:
        raise StorageError(error.errno, f"reading {said} failed: {error.strerror}", said) from error
    except Exception as error:
        raise CheckpointCorruptError(
            f"{said}: torch cannot read it: {type(error).__name__}: {str(error)[:200]}"
        ) from error
