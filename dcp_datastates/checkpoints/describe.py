"""Describes a checkpoint, or a directory of checkpoints, from its metadata and the names on storage.

Nothing is unpickled, and no data file is opened.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dcp_datastates.checkpoints.inventory import is_directory
from dcp_datastates.checkpoints.listing import natural_order
from dcp_datastates.checkpoints.overview import (
    Directory,
    UncommittedAttempt,
    overview,
    ranks_of,
    uncommitted_at,
)
from dcp_datastates.checkpoints.pins import pins
from dcp_datastates.errors import CheckpointNotFoundError, ForeignCheckpointError
from dcp_datastates.io.committed import Committed, open_committed, sizes
from dcp_datastates.process.forks import public
from dcp_datastates.storage import attempts
from dcp_datastates.storage.object_path import AnyPath, Location, copies_in, locate
from dcp_datastates.text import columns, count, date, numbers, size

_SHOWN: Final = 16
"""How many tensors and objects, files, or checkpoints a text lists."""


@dataclass(frozen=True)
class Tensor:
    """A saved tensor, all chunks together. ``nbytes`` is its dense size."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    chunks: int


@dataclass(frozen=True)
class Object:
    """A Python object, pickled."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class DtypeTotal:
    """All tensors of one dtype."""

    dtype: str
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class DataFile:
    """A data file of the committed attempt."""

    path: str
    """Relative to the checkpoint."""
    rank: int | None
    nbytes: int
    found_nbytes: int | None
    """Bytes on storage; None if the file is missing."""
    nodes: tuple[str, ...] = ()
    """Where its copies lie, if the store has several."""

    @property
    def problem(self) -> str | None:
        """What is wrong with the file, as far as its size tells."""
        if self.found_nbytes is None:
            return "missing"
        if self.found_nbytes != self.nbytes:
            return f"has {self.found_nbytes} bytes instead of {self.nbytes}"
        return None


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint. Sizes are bytes, times are seconds since the epoch."""

    path: Location
    committed: bool
    attempt: str | None
    committed_at: float | None
    nbytes: int
    """Bytes of the committed checkpoint, ``.metadata`` included."""
    ranks: int
    files: tuple[DataFile, ...] = field(repr=False)
    dtypes: tuple[DtypeTotal, ...] = field(repr=False)
    """Totals by dtype, largest first."""
    tensors: tuple[Tensor, ...] = field(repr=False)
    objects: tuple[Object, ...] = field(repr=False)
    uncommitted: tuple[UncommittedAttempt, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    pins: tuple[str, ...] = ()
    """Why it is never deleted: the names that it is pinned under."""

    def __str__(self) -> str:
        """As :meth:`text`, with the first tensors and objects."""
        return self.text(_SHOWN)

    def text(self, most: int | None) -> str:
        """All of it, with the first files (problems before others), and ``most`` tensors and objects (None: all)."""
        lines = [str(self.path)]
        if self.committed:
            objects = size(sum(each.nbytes for each in self.objects))
            lines += [
                f"  committed {date(self.committed_at)}, attempt {self.attempt}",
                (
                    f"  {size(self.nbytes)} in {count(len(self.files), 'file')} of {count(self.ranks, 'rank')}: "
                    f"{count(len(self.tensors), 'tensor')}, {count(len(self.objects), 'object')} ({objects})"
                ),
            ]
        else:
            lines.append("  not committed")
        if self.metrics:
            lines.append(f"  {numbers(self.metrics)}")
        if self.pins:
            lines.append(f"  pinned: {', '.join(self.pins)}")
        lines += [
            f"  attempt {each.attempt} is {each.state}: {count(each.files, 'file')}, {size(each.nbytes)}"
            + (f", written until {date(each.written_at)}" if each.written_at else "")
            for each in self.uncommitted
        ]
        if self.dtypes:
            totals = [(each.dtype, each.tensors, size(each.nbytes)) for each in self.dtypes]
            lines += ["", *columns(("dtype", "tensors>", "size>"), totals)]
        if self.files:
            files = sorted(self.files, key=lambda file: file.problem is None)
            on = ", ".join
            rows = [(f.path, f.rank, size(f.nbytes), f.problem or on(f.nodes)) for f in files]
            lines += ["", *columns(("file", "rank>", "size>", ""), rows, _SHOWN)]
        if most != 0 and (self.tensors or self.objects):
            lines += ["", *self._contents(most)]
        return "\n".join(lines)

    def _contents(self, most: int | None) -> list[str]:
        rows: list[tuple[object, ...]] = []
        for tensor in self.tensors:
            shape = " × ".join(map(str, tensor.shape)) or "scalar"
            rows.append((tensor.name, shape, tensor.dtype, size(tensor.nbytes), tensor.chunks))
        rows += [(each.name, "", "object", size(each.nbytes), None) for each in self.objects]
        return columns(("name", "shape", "dtype", "size>", "chunks>"), rows, most)


@public("inspect()")
def inspect(
    path: AnyPath, *, storage_options: Mapping[str, Any] | None = None
) -> Checkpoint | Directory:
    """Describe ``path``: a checkpoint, committed or not, or a directory of checkpoints; or the URL of one.
    ``storage_options`` are fsspec's, for a URL.

    Raises :class:`CheckpointNotFoundError` if it is neither, saying what is there instead
    (:class:`ForeignCheckpointError` for a stock DCP checkpoint), :class:`CheckpointCorruptError` if the
    metadata are damaged, or :class:`StorageError`.
    """
    directory = locate(path, options=storage_options)
    try:
        return _checkpoint(directory, open_committed(directory))
    except ForeignCheckpointError:
        raise
    except CheckpointNotFoundError:
        if attempts.present(directory):
            uncommitted = uncommitted_at(directory)
            return Checkpoint(directory, False, None, None, 0, 0, (), (), (), (), uncommitted)
        if not is_directory(directory):
            raise
        listed = overview(directory)
        if not listed.checkpoints and listed.failure is None:
            raise
        return listed


def _checkpoint(directory: Location, committed: Committed) -> Checkpoint:
    tensors, objects = _contents(committed)
    copies = copies_in(directory / committed.note.attempt.name)
    return Checkpoint(
        path=directory,
        committed=True,
        attempt=committed.note.attempt.name,
        committed_at=committed.committed_at,
        nbytes=committed.nbytes,
        ranks=ranks_of(committed.note.files),
        files=tuple(
            DataFile(
                name,
                attempts.rank_of(name),
                committed.note.files[name].nbytes,
                found if isinstance(found, int) else None,
                tuple(copies.get(Path(name).name, ())),
            )
            for name, found in sizes(directory, committed.note.files.keys()).items()
        ),
        dtypes=_totals(tensors),
        tensors=tensors,
        objects=objects,
        uncommitted=uncommitted_at(directory, committed.note.attempt),
        metrics=committed.note.metrics,
        pins=pins(directory),
    )


def _contents(committed: Committed) -> tuple[tuple[Tensor, ...], tuple[Object, ...]]:
    catalog = committed.table.catalog
    lengths = iter(committed.table.placement.lengths[catalog.chunks :].tolist())
    tensors, objects = [], []
    shapes = [tuple(catalog.shape(number)) for number in range(len(catalog.names))]
    columns = (catalog.properties.tolist(), shapes, catalog.counts.tolist())
    for name, properties, shape, chunks in zip(catalog.names, *columns, strict=True):
        if properties < 0:
            objects.append(Object(name, next(lengths)))
            continue
        dtype = catalog.table[properties].dtype
        nbytes = math.prod(shape) * dtype.itemsize
        tensors.append(Tensor(name, shape, str(dtype).removeprefix("torch."), nbytes, chunks))
    return (
        tuple(sorted(tensors, key=lambda tensor: natural_order(tensor.name))),
        tuple(sorted(objects, key=lambda element: natural_order(element.name))),
    )


def _totals(tensors: Iterable[Tensor]) -> tuple[DtypeTotal, ...]:
    counts: dict[str, tuple[int, int]] = {}
    for tensor in tensors:
        number, nbytes = counts.get(tensor.dtype, (0, 0))
        counts[tensor.dtype] = number + 1, nbytes + tensor.nbytes
    totals = [DtypeTotal(dtype, *count) for dtype, count in counts.items()]
    return tuple(sorted(totals, key=lambda total: (-total.nbytes, total.dtype)))
