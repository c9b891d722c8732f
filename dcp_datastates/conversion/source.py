"""What is converted or compared: a flat state of tensors and objects.

Tensors are mapped from files, or read when they are asked for. So memory depends on the largest tensor, not on the
checkpoint.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_datastates.conversion.files import loaded
from dcp_datastates.errors import ConfigurationError, StorageError, UnsupportedStateError
from dcp_datastates.format.key_paths import KeyPath, empties, nested, with_types
from dcp_datastates.format.metadata_table import Catalog
from dcp_datastates.format.stored_names import renamed_path
from dcp_datastates.loading.stored import shapes_of
from dcp_datastates.storage.object_path import Location
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
        """An object as a Python value. Raises as :func:`~dcp_datastates.conversion.files.loaded`."""
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
