"""Describes a checkpoint, or a directory of checkpoints, from its metadata and the names on storage.

Nothing is unpickled, and no data file is opened.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

from dcp_datastates.checkpoints.find import flaw
from dcp_datastates.checkpoints.inventory import (
    attempts_at,
    is_committed,
    is_directory,
    may_be_committed,
)
from dcp_datastates.checkpoints.listing import Found, directories, natural_order, newest_first
from dcp_datastates.checkpoints.pins import pins
from dcp_datastates.errors import (
    CheckpointNotFoundError,
    DataStatesError,
    ForeignCheckpointError,
    StorageError,
)
from dcp_datastates.format.metadata_table import FileRecord
from dcp_datastates.io.committed import Committed, open_committed
from dcp_datastates.io.stored_files import sizes
from dcp_datastates.process.forks import enter
from dcp_datastates.storage import attempts, decisions
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.object_path import Location, copies_in, locate, stored
from dcp_datastates.text import columns, count, date, numbers, size, step_of

_SHOWN: Final = 16
"""How many tensors and objects, files, or checkpoints a text lists."""

State = Literal["undecided", "withdrawn", "replaced", "deleted"]
"""Of an attempt that is not the checkpoint at its path. Undecided: its save is in flight, or was abandoned."""

_STATES: Final[dict[decisions.State | None, State]] = {
    None: "undecided",
    decisions.State.WITHDRAWN: "withdrawn",
    decisions.State.COMMITTED: "replaced",
    decisions.State.DELETED: "deleted",
}


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
    """Bytes according to the metadata."""
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
class UncommittedAttempt:
    """The files of a save that is still running, or has failed."""

    attempt: str
    state: State
    files: int
    nbytes: int


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
    files: tuple[DataFile, ...]
    dtypes: tuple[DtypeTotal, ...]
    """Totals by dtype, largest first."""
    tensors: tuple[Tensor, ...]
    objects: tuple[Object, ...]
    uncommitted: tuple[UncommittedAttempt, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    pins: tuple[str, ...] = ()
    """Why it is never deleted: the names that it is pinned under."""

    def __str__(self) -> str:
        """As :meth:`text`, with the first tensors and objects."""
        return self.text(_SHOWN)

    def text(self, most: int | None) -> str:
        """The time of the commit, the size, the dtypes, the first files (those with problems before the others), and
        ``most`` tensors and objects (None: all).
        """
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


@dataclass(frozen=True)
class Listed:
    """One entry of a directory of checkpoints."""

    name: str
    step: int | None
    format: Literal["dcp_datastates", "other"]
    committed: bool
    attempt: str | None = None
    """The committed attempt; for an uncommitted checkpoint, the newest."""
    nbytes: int | None = None
    ranks: int | None = None
    committed_at: float | None = None
    problem: str | None = None
    """Why :func:`~dcp_datastates.latest` would skip it."""
    unjudged: bool = False
    """Whether storage does not show what is there: :func:`~dcp_datastates.latest` then raises, and ``retain`` deletes
    nothing, unless something newer is whole.
    """
    metrics: Mapping[str, float] = field(default_factory=dict)
    pins: tuple[str, ...] = ()


@dataclass(frozen=True)
class Directory:
    """A directory of checkpoints: those of this package from newest to oldest, then all others."""

    path: Location
    latest: str | None
    """The name of the checkpoint that :func:`~dcp_datastates.latest` returns."""
    checkpoints: tuple[Listed, ...]

    def __str__(self) -> str:
        return self.text(_SHOWN)

    def text(self, most: int | None) -> str:
        """A line for each of ``most`` checkpoints (None: all): the time of the commit, the size, and whether it is the
        latest or why not.
        """
        rows = [
            (
                each.name,
                each.step,
                date(each.committed_at) or _said(each),
                each.attempt,
                None if each.nbytes is None else size(each.nbytes),
                each.ranks,
                numbers(each.metrics),
                self._note(each),
            )
            for each in self.checkpoints
        ]
        headers = ("checkpoint", "step>", "committed", "attempt", "size>", "ranks>", "metrics", "")
        return "\n".join([str(self.path), *columns(headers, rows, most)])

    def _note(self, each: Listed) -> str:
        notes = ["latest" if each.name == self.latest else each.problem]
        if each.pins:
            notes.append(f"pinned: {', '.join(each.pins)}")
        return "; ".join(filter(None, notes))


def _said(each: Listed) -> str:
    if each.committed:
        return "yes"
    return "unknown" if each.unjudged else "no"


def describe(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> Checkpoint | Directory:
    """Describe ``path``: a checkpoint, committed or not, or a directory of checkpoints; or the URL of one.
    ``storage_options`` are fsspec's, for a URL.

    Raises :class:`CheckpointNotFoundError` if it is neither, saying what is there instead
    (:class:`ForeignCheckpointError` for a stock DCP checkpoint), :class:`CheckpointCorruptError` if the
    metadata are damaged, or :class:`StorageError`.
    """
    enter("inspect()")
    directory = locate(path, options=storage_options)
    try:
        return _checkpoint(directory, open_committed(directory))
    except ForeignCheckpointError:
        raise
    except CheckpointNotFoundError:
        if attempts_at(directory):
            uncommitted = _uncommitted(directory, None)
            return Checkpoint(directory, False, None, None, 0, 0, (), (), (), (), uncommitted)
        if not is_directory(directory):
            raise
        listed = _directory(directory)
        if not listed.checkpoints:
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
        ranks=_ranks(committed.note.files),
        files=tuple(
            _file(committed.note.files[name], found, copies.get(Path(name).name, ()))
            for name, found in sizes(directory, committed.note.files.keys()).items()
        ),
        dtypes=_totals(tensors),
        tensors=tensors,
        objects=objects,
        uncommitted=_uncommitted(directory, committed.note.attempt),
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


def _ranks(paths: Iterable[str]) -> int:
    return len({attempts.rank_of(Path(path).name) for path in paths} - {None})


def _file(record: FileRecord, found: int | OSError, nodes: Sequence[str]) -> DataFile:
    name = record.relative_path
    rank = attempts.rank_of(Path(name).name)
    nbytes = found if isinstance(found, int) else None
    return DataFile(name, rank, record.nbytes, nbytes, tuple(nodes))


def _uncommitted(directory: Location, committed: Attempt | None) -> tuple[UncommittedAttempt, ...]:
    place = stored(directory)
    others = [attempt for attempt in attempts.present(place) if attempt != committed]
    return tuple(
        UncommittedAttempt(
            attempt.name,
            _STATES[decisions.state_of(place, attempt)],
            len(contents.data),
            sum(each.nbytes for each in contents.data),
        )
        for attempt, contents in sorted(attempts.survey(place, others).items())
    )


def _directory(root: Location) -> Directory:
    everything = directories(root)
    ours = [_listed(found) for found in newest_first(filter(may_be_committed, everything))]
    names = {listed.name for listed in ours}
    others = _others(path for path in everything if path.name not in names)
    first = next((each for each in ours if each.problem is None or each.unjudged), None)
    latest = None if first is None or first.unjudged else first.name
    return Directory(root, latest, (*ours, *others))


def newest(root: Location, most: int) -> tuple[list[Listed], list[Listed]]:
    """The ``most`` newest checkpoints of this package in ``root``, newest first; and all saves without a commit.

    Reads no more metadata than that needs. Raises :class:`StorageError` if ``root`` cannot be read.
    """
    everything = directories(root)
    ours = [path for path in everything if may_be_committed(path)]
    listed = [_listed(found) for found in islice(newest_first(ours), most)]
    return listed, list(_others(path for path in everything if path not in ours))


def _listed(found: Found) -> Listed:
    unjudged = False
    try:
        problem = flaw([found], "structure")
        pinned = pins(found.path)
    except StorageError as error:
        problem, pinned, unjudged = str(error), (), True
    listed = Listed(
        name=found.path.name,
        step=step_of(found.path.name),
        format="dcp_datastates",
        committed=found.error is None,
        attempt=None if found.error is not None else found.attempt.name,
        problem=problem,
        unjudged=unjudged,
        metrics=found.metrics,
        pins=pinned,
    )
    if (committed := found.committed) is None:
        return listed
    return replace(
        listed,
        nbytes=committed.nbytes,
        ranks=_ranks(committed.note.files),
        committed_at=committed.committed_at,
    )


def _others(paths: Iterable[Location]) -> Iterator[Listed]:
    """The uncommitted saves and other programs' checkpoints among the directories ``paths``."""
    for path in paths:
        name, step = path.name, step_of(path.name)
        try:
            claimed, committed = attempts_at(path), is_committed(path)
        except StorageError as error:
            yield Listed(name, step, "other", False, problem=str(error), unjudged=True)
            continue
        if committed:
            try:
                open_committed(path)
            except ForeignCheckpointError:
                yield Listed(name, step, "other", True, problem="a stock DCP checkpoint")
                continue
            except DataStatesError as error:
                yield Listed(name, step, "other", True, problem=str(error))
                continue
        if claimed:
            state = _STATES[decisions.state_of(stored(path), claimed[-1])]
            problem = (
                f"not committed: {'in flight or abandoned' if state == 'undecided' else state}"
            )
            yield Listed(name, step, "dcp_datastates", False, claimed[-1].name, problem=problem)
