"""The files of one rank's part of a checkpoint, laid out.

If a part is written again and again, its layout is kept (:class:`KnownFiles`), with each tensor's position in the
state (:class:`KnownState`): then a save only looks up the tensors' present addresses, in a few operations on arrays. Of
plans and files, those that were used last are kept (:class:`Recent`).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Final, Generic, TypeVar

import numpy as np
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_datastates._native import Transfer
from dcp_datastates.format.key_paths import key_of
from dcp_datastates.format.layout import FileLayout, LayoutItem, SealedFile, lay_out
from dcp_datastates.format.ragged import Ints
from dcp_datastates.io.devices import HOST
from dcp_datastates.planning.comparison import Turn, in_turn
from dcp_datastates.planning.messages import OBJECT, LocalPlan, RankPlan, Report
from dcp_datastates.planning.samples import Held
from dcp_datastates.staging.staged_state import StagedState

KEPT: Final = 8
"""How many values are kept: a job may save several state dicts in turn, each with plans of its own."""

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Recent(Generic[_Key, _Value]):
    """The :data:`KEPT` values that were used last, by key. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._values: dict[_Key, _Value] = {}  # the latest used at the end

    def get(self, key: _Key) -> _Value | None:
        """The value of ``key``, which counts as used."""
        with self._lock:
            value = self._values.get(key)
            # Most often it is the latest already: then the key, which may be large, is not hashed again.
            if value is not None and value is not next(reversed(self._values.values())):
                self._values[key] = self._values.pop(key)
            return value

    def put(self, key: _Key, value: _Value) -> None:
        """Keep ``value``, in place of the one with this key or of the one that was used the longest ago."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = value
            if len(self._values) > KEPT:
                del self._values[next(iter(self._values))]


class PartFiles:
    """The files of what a rank writes, or compares. Any thread may use it.

    Args:
        items: what the layout has of them.
        rank: the rank that writes them.
    """

    items: Mapping[int, WriteItem]
    """Those that the planning resolves, by their numbers."""

    def __init__(self, items: Sequence[LayoutItem], rank: int) -> None:
        self.layouts: Final = lay_out(items, rank)
        self._count = len(items)
        self._sealed: Recent[Hashable, tuple[list[SealedFile], Report]] = Recent()

    @staticmethod
    def of(items: Sequence[WriteItem], rank: int) -> PartFiles:
        """The files of these items, which the planning resolves."""
        part = PartFiles(list(map(LayoutItem.of, items)), rank)
        part.items = dict(enumerate(items))
        return part

    def seal(self, object_sizes: tuple[tuple[int, ...], ...]) -> tuple[list[SealedFile], Report]:
        """The files whose objects have these sizes in bytes: by file, in the order of the layout. And the places of all
        items in them.
        """
        sealed = self._sealed.get(object_sizes)
        if sealed is None:
            pairs = zip(self.layouts, object_sizes, strict=True)
            files = [layout.seal(sizes) for layout, sizes in pairs]
            sealed = files, report_of(self.layouts, files, self._count)
            self._sealed.put(object_sizes, sealed)
        return sealed


class KnownFiles(PartFiles):
    """The files of a part whose tensors are known by their positions in the state; only objects are resolved.

    Args:
        positions: position in the state of each item's tensor; -1 for an object.
        begins: the first row of each item within its tensor.
    """

    def __init__(
        self, items: Sequence[LayoutItem], rank: int, positions: Ints, begins: Sequence[int]
    ) -> None:
        super().__init__(items, rank)
        self.items = {
            number: WriteItem(MetadataIndex(item.fqn), WriteItemType.BYTE_IO)
            for number, item in enumerate(items)
            if item.dtype is None
        }
        self._columns = [_Columns.of(layout, positions, begins) for layout in self.layouts]
        self.in_turns: dict[Turn, dict[int, PartFiles]] = {}
        """What the rank compares in each turn, for each set of ranks."""

    def add_tensors(
        self, addresses: Ints, groups: Ints, devices: Ints | None, content: Transfer, file: int
    ) -> None:
        """Add to ``content`` the tensors of a file, of a state whose tensors are there: as of ``StagedState.bases``."""
        columns = self._columns[file]
        content.add_many(
            columns.offsets,
            columns.sizes,
            (addresses[columns.positions] + columns.within).tolist(),
            groups[columns.positions].tolist(),
            None if devices is None else devices[columns.positions].tolist(),
        )


@dataclass(frozen=True, eq=False)
class _Columns:
    """The tensors of one file, without empty ones."""

    positions: Ints
    """In the state."""
    within: Ints
    """The chunk's offset in its tensor's memory, in bytes."""
    offsets: list[int]
    sizes: list[int]

    @staticmethod
    def of(layout: FileLayout, positions: Ints, begins: Sequence[int]) -> _Columns:
        """Of positions and first rows by item."""
        entries = [entry for entry in layout.tensors if entry.nbytes]
        row_bytes = [entry.nbytes // entry.sizes[0] if entry.sizes else 0 for entry in entries]
        within = [begins[entry.item] * row for entry, row in zip(entries, row_bytes, strict=True)]
        return _Columns(
            positions[np.array([entry.item for entry in entries], np.int64)],
            np.array(within, np.int64),
            [entry.offset for entry in entries],
            [entry.nbytes for entry in entries],
        )


def report_of(layouts: Sequence[FileLayout], sealed: Sequence[SealedFile], count: int) -> Report:
    """The report of the places of ``count`` items."""
    places = np.zeros((3, count), np.int64)
    for number, (layout, file) in enumerate(zip(layouts, sealed, strict=True)):
        tensors = [entry.item for entry in layout.tensors]
        objects = [entry.item for entry in layout.objects]
        places[0, tensors + objects] = number
        places[1, tensors] = [entry.offset for entry in layout.tensors]
        places[2, tensors] = [entry.nbytes for entry in layout.tensors]
        places[1, objects], places[2, objects] = file.object_offsets, file.object_sizes
    pairs = zip(layouts, sealed, strict=True)
    files = tuple([(layout.name, file.nbytes, file.table_offset) for layout, file in pairs])
    return Report(files, *places)


# ---- states whose plans are known ---------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class KnownState:
    """The plan of states with one :data:`StateKey`, and where its items are in such a state. A state that is known so
    is not flattened, planned or laid out again.
    """

    plan: LocalPlan
    positions: Ints
    """By item: the tensor's position in the traversal; -1 for an object."""
    paths: dict[str, tuple[Any, ...]]
    """For each object: the keys of its path."""
    files_of_shares: Recent[bytes, KnownFiles] = field(default_factory=Recent)
    """By the share's digest."""

    @staticmethod
    def of(
        plan: LocalPlan, staged: StagedState, state: Any, paths: Mapping[str, Sequence[Any]]
    ) -> KnownState | None:
        """Where the plan's items are in the state that was planned; None if names do not identify them.

        ``state`` has all its tensors, and ``paths`` are those in it (``key_paths.py``).
        """
        columns = staged.traversal.columns
        # By name: one tensor may occur in several places, where the next state may have different tensors.
        place = {columns.name(position): position for position in range(len(columns.keys))}
        if len(place) != len(columns.keys):
            return None
        names, is_tensor = plan.head.names, plan.head.kinds != OBJECT
        positions = np.array([place.get(name, -1) for name in names], np.int64)
        positions[~is_tensor] = -1
        if (positions[is_tensor] < 0).any():
            return None  # these are not the staged tensors
        keys = {}
        for name in compress(names, ~is_tensor):
            path = _real_path(state, paths.get(name, (name,)))
            if path is None:
                return None
            keys[name] = path
        return KnownState(plan, positions, keys)

    def files(self, share: RankPlan, rank: int) -> KnownFiles:
        """The files of a share of the plan, laid out once."""
        files = self.files_of_shares.get(share.digest)
        if files is None:
            items, begins = share.layout_items(self.plan), share.begins.tolist()
            files = KnownFiles(items, rank, self.positions[share.items], begins)
            self.files_of_shares.put(share.digest, files)
        return files

    def compared(self, share: RankPlan, turn: Turn, rank: int) -> dict[int, PartFiles]:
        """What the rank with this share compares, for each set of ranks, laid out once."""
        known = self.files(share, rank).in_turns
        if turn not in known:
            known[turn] = {
                number: KnownFiles(
                    part.layout_items(self.plan),
                    0,
                    self.positions[part.items],
                    part.begins.tolist(),
                )
                for number, part in in_turn(self.plan, share, turn).items()
            }
        return known[turn]

    def held(self, staged: StagedState, items: Ints) -> Held:
        """The addresses of the tensors of these items, after waiting for their eager copies; of objects, none."""
        staged.copying.wait()
        positions = self.positions[items]
        tensors = np.flatnonzero(positions >= 0)
        positions = positions[tensors]
        held = Held(np.zeros(len(items), np.int64), np.zeros(len(items), np.int64))
        addresses, _, devices = staged.bases()
        sizes = self.plan.nbytes(items[tensors])
        if devices is not None:
            sizes[devices[positions] != HOST] = 0
        held.addresses[tensors], held.sizes[tensors] = addresses[positions], sizes
        return held


def _real_path(root: Any, path: Sequence[Any]) -> tuple[Any, ...] | None:
    """The actual keys of a path, which may have a key as a string that cannot be stored."""
    keys: list[Any] = []
    value = root
    for part in map(key_of, path):
        if isinstance(value, list) or part in value:
            key = part
        else:
            named = [other for other in value if str(other) == part]
            if len(named) != 1:
                return None
            key = named[0]
        keys.append(key)
        value = value[key]
    return tuple(keys)
