"""What is converted or compared: the tensors and objects of a checkpoint, and which of them are taken.

Tensors are mapped from files, or read when they are asked for. So memory depends on the largest tensor, not on the
checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import io
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import torch
from typing_extensions import Buffer

from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
    StorageError,
    UnsafeObjectError,
    UnsupportedTensorError,
)
from dcp_datastates.format import stored_names
from dcp_datastates.format.key_paths import KeyPath
from dcp_datastates.format.stored_names import NamePatterns, Rename
from dcp_datastates.io.committed import range_reader
from dcp_datastates.io.tensor_memory import without_bytes
from dcp_datastates.io.unpickling import unpickled
from dcp_datastates.storage.local import explained
from dcp_datastates.storage.object_path import Location, stored
from dcp_datastates.storage.object_store import ObjectMissingError
from dcp_datastates.text import size

PIECE_BYTES: Final = 4 << 20
"""What is read of small tensors at a time."""

_OPTIMIZER: Final = re.compile(r"(.+?)\.(?:param_groups(?=$|[.\[])|groups\..+\.[0-9a-f]{8}$)")
"""A name within the state of an optimizer, and the optimizer's."""

_SHORT: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}

_MOST_EXPANDED: Final = 128 << 20
"""A file of a few bytes may have a tensor of any size, all of whose elements are one."""


@dataclass(eq=False)
class Source:
    """A checkpoint of any format, whose tensors are mapped; subclasses read them. Any thread may call its methods."""

    path: Location
    format: str
    """The format, for people."""
    tensors: Mapping[str, torch.Tensor]
    """In their order. Those of a subclass have no data: they are on the device "meta"."""
    objects: Mapping[str, Callable[[], bytes]]
    """In their order. Each gives the bytes that ``torch.save`` writes, and raises as :meth:`read`."""
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

    def value(self, name: str, allow_objects: bool) -> Any:
        """An object as a Python value. Raises as :func:`loaded`."""
        data = io.BytesIO(self.objects[name]())
        return loaded(data, f"{self.path}: object {name!r}", allow_objects)

    def memory_for(self, name: str) -> torch.Tensor:
        """Memory for a tensor, on the host. Raises :class:`StorageError` if there is not enough."""
        try:
            return torch.empty_like(self.tensors[name], device="cpu")
        except RuntimeError as error:
            nbytes = size(self.tensors[name].nbytes)
            text = f"there is no memory for {name!r}, which has {nbytes}"
            raise StorageError(errno.ENOMEM, text, str(self.path)) from error

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

    def each(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Read the tensors of these names, small ones several at a time. The caller drops each before it asks for the
        next, so that its memory is free for that one. Raises as :meth:`read`.
        """
        for group in self.groups(names, PIECE_BYTES):
            tensors = self.read(group)[::-1]
            for name in group:
                yield name, tensors.pop()


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
            {new: _described(tensors[old], dtype) for new, old in old_of.items() if old in tensors},
            {new: objects[old] for new, old in old_of.items() if old in objects},
            {
                new: stored_names.renamed_path(source.paths[old], old, new)
                for new, old in old_of.items()
            },
        )
        self._source, self._old_of = source, old_of

    def read(self, names: Sequence[str]) -> list[torch.Tensor]:
        """See :class:`Source`."""
        found = self._source.read([self._old_of[name] for name in names])
        return [each.to(self.tensors[name].dtype) for name, each in zip(names, found, strict=True)]


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
    return tensor.to("meta", dtype)


def select(
    source: Source,
    only: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
    part: str | None = None,
    rename: Rename | None = None,
    dtype: str | torch.dtype | None = None,
) -> Source:
    """The values that these options of :func:`~dcp_datastates.conversion.convert.convert` take from ``source``.

    Raises :class:`ConfigurationError`, naming the first option that cannot work, for names that collide, or if nothing
    is left; :class:`IncompatibleStateError`, listing similar names, for a key or an excluded name that fits nothing;
    :class:`UnsupportedTensorError` for a tensor that is taken and cannot be read.
    """
    if part is not None and (not isinstance(part, str) or not part):
        raise ConfigurationError(f"part={part!r} must be a name, such as 'model'")
    if part is not None and only is not None:
        raise ConfigurationError(
            f"part={part!r} and only={only!r} both choose; part takes all below one name, and removes that name"
        )
    stored_names.check_rename(rename)
    target_dtype = parse_dtype(dtype)
    root = None if part is None else NamePatterns("part", part)
    wanted = root if only is None else NamePatterns("only", only)
    unwanted = NamePatterns("exclude", exclude)
    taken = names = list(source.paths)
    if wanted is not None:
        taken = wanted.choose(names)
    left_out = set(unwanted.choose(taken))
    taken = [name for name in taken if name not in left_out]
    if names and not taken:
        raise ConfigurationError(
            f"nothing is left of {source.path}: exclude={sorted(unwanted.given)} takes all out"
        )
    for name in taken:
        tensor = source.tensors.get(name)
        if tensor is not None and (type(source) is Source or not tensor.is_meta):
            _check_plain(source.path, name, tensor)
    old_of = stored_names.renamed(taken, rename, part=root, all_used=True)
    return Selected(source, old_of, target_dtype)


def _check_plain(path: Location, name: str, tensor: torch.Tensor) -> None:
    """Raise :class:`UnsupportedTensorError` for a tensor that has not all its values in dense bytes of its own."""
    found = without_bytes(tensor)
    if found is not None:
        reason, way_out = found
    elif type(tensor.detach()) is not torch.Tensor:
        reason, way_out = f"a {type(tensor).__name__}", "make it a plain tensor"
    elif tensor.is_conj() or tensor.is_neg():
        reason = "a view with conjugate or negative values"
        way_out = "resolve_conj().resolve_neg() it"
    elif tensor.nbytes > max(_MOST_EXPANDED, 4 * tensor.untyped_storage().nbytes()):
        reason, way_out = "a view of far fewer elements than it has", "make it contiguous()"
    else:
        return
    raise UnsupportedTensorError(
        f"{path}: {name!r} is {reason}; leave it out with exclude={name!r} (--exclude), or {way_out} before torch.save "
        f"stores it"
    )


def optimizers_in(source: Source) -> list[str]:
    """The names of the optimizers whose states are in ``source``."""
    found = filter(None, map(_OPTIMIZER.match, source.names()))
    return list(dict.fromkeys(each[1] for each in found))


def parse_dtype(dtype: Any) -> torch.dtype | None:
    """The floating-point dtype of this name. Raises :class:`ConfigurationError` for another."""
    if dtype is None:
        return None
    found = dtype
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        found = getattr(torch, _SHORT.get(name, name), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigurationError(
            f"dtype={dtype!r} is no floating-point dtype; give one such as 'bfloat16' or 'bf16'"
        )
    return found


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor on the host, in row-major order: its own memory, if they lie so."""
    if not tensor.numel():
        return memoryview(b"")
    data: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(data)


# ---- files of other programs, in the file system or in a store ---------------------------------------


_REQUEST_BYTES: Final = 16 << 20
"""What is read of an object by one request."""


def file_bytes(path: Location) -> int:
    """The size of the file at ``path``. Raises :class:`CheckpointNotFoundError` or :class:`StorageError`."""
    place = stored(path)
    try:
        return place.store.size(place.key)
    except ObjectMissingError as error:
        text = f"opening {path} failed: {error.strerror}"
        raise CheckpointNotFoundError(error.errno, text, str(path)) from None


def read_part(path: Location, begin: int, nbytes: int) -> Buffer:
    """``nbytes`` of the file at ``path`` from ``begin`` on; fewer at its end. Raises as :func:`file_bytes`, also for
    what is no file.
    """
    return range_reader([path])(str(path), begin, begin + nbytes)


def read_whole(path: Location) -> bytes:
    """The bytes of a small file. Raises :class:`StorageError`."""
    place = stored(path)
    return place.store.get(place.key)


@contextlib.contextmanager
def local_file(path: Location) -> Iterator[Path]:
    """A file with the bytes at ``path``: of an object in a store, a copy in the directory for temporary files, which is
    removed with the context; a mapping of it stays. Raises as :func:`read_part`.
    """
    if isinstance(path, Path):
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="dcp_datastates-") as copy:
        nbytes = file_bytes(path)
        with explained("copying to a temporary file", copy.name, nbytes):
            for begin in range(0, nbytes, _REQUEST_BYTES):
                copy.write(read_part(path, begin, _REQUEST_BYTES))
            copy.flush()
        yield Path(copy.name)


def mapped(path: Location) -> torch.Tensor:
    """The bytes of a file, mapped. Raises as :func:`read_part`."""
    with local_file(path) as local:
        read_part(local, 0, 1)  # of a pipe, a mapping would wait for the other end
        nbytes = file_bytes(local)
        try:
            return torch.from_file(str(local), size=nbytes, dtype=torch.uint8, device="cpu")
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
