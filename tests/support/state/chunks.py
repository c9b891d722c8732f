"""Many ranks in one process: tensors cut into boxes by hand, saved and loaded by driving DCP's parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_datastates import DataStatesReader
from dcp_datastates.commit.group import CommitGroup, Progress, commit_group
from dcp_datastates.commit.place import Place, Round
from dcp_datastates.config import WriterConfig
from dcp_datastates.dcp.object_planning import ObjectPlanning
from dcp_datastates.io.reads import Reads
from dcp_datastates.ranks.rank_set import ALONE, RankSet
from dcp_datastates.results import SaveStats
from dcp_datastates.saving.operation import SaveOperation, Ticket
from dcp_datastates.saving.outcome import SaveOrigin
from dcp_datastates.saving.write import begin_write
from dcp_datastates.storage import local
from dcp_datastates.storage.claims import Neighbours, claim


@dataclass(frozen=True)
class Box:
    """A hyperrectangle of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of ``tensor`` that this box covers."""
        for dimension, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dimension, offset, size)
        return tensor

    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))


def boxes(shape: Iterable[int], cuts: Iterable[Iterable[int]]) -> list[Box]:
    """The grid that the ``cuts`` of each dimension make of ``shape``."""
    sides = []
    for size, places in zip(shape, cuts, strict=True):
        edges = sorted({0, size, *(place for place in places if 0 < place < size)})
        sides.append(list(itertools.pairwise(edges)) or [(0, 0)])
    return [
        Box(tuple(a for a, _ in corner), tuple(b - a for a, b in corner))
        for corner in itertools.product(*sides)
    ]


def item(
    name: str,
    shape: Iterable[int],
    box: Box | None = None,
    dtype: torch.dtype = torch.float32,
    **properties: Any,
) -> WriteItem:
    """A shard; the whole tensor without a box."""
    kind = WriteItemType.TENSOR if box is None else WriteItemType.SHARD
    size = torch.Size(shape)
    box = box or Box((0,) * len(size), tuple(size))
    described = TensorProperties(dtype=dtype, **properties)
    data = TensorWriteData(box.chunk(), described, size)
    return WriteItem(MetadataIndex(name, box.offsets), kind, tensor_data=data)


Pieces = Mapping[str, tuple[torch.Tensor, list[Box]]]
"""By name, a dense tensor and the boxes of it that a rank has."""


class _SavePieces(DefaultSavePlanner):
    def __init__(self, pieces: Pieces) -> None:
        super().__init__()
        self._pieces = pieces

    def create_local_plan(self) -> SavePlan:
        items = [
            item(name, tensor.shape, box, tensor.dtype)
            for name, (tensor, mine) in self._pieces.items()
            for box in mine
        ]
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        tensor, _ = self._pieces[write_item.index.fqn]
        chunk = write_item.tensor_data.chunk
        return Box(tuple(chunk.offsets), tuple(chunk.sizes)).of(tensor)


class _LoadPieces(DefaultLoadPlanner):
    def __init__(self, pieces: Pieces) -> None:
        super().__init__()
        self._pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        items: list[Any] = []
        for name, (_, mine) in self._pieces.items():
            stored = self.metadata.state_dict_metadata[name]
            items += create_read_items_for_chunk_list(name, stored, [box.chunk() for box in mine])  # type: ignore[arg-type]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        tensor, mine = self._pieces[index.fqn]
        (box,) = (box for box in mine if box.offsets == tuple(index.offset or ()))
        return box.of(tensor)


@dataclass
class _Group:
    """What a save needs of its commit group until it is read."""

    rank_set: RankSet
    round: Round | None = None

    def announce(self, number: int) -> None:
        pass

    def reading(self, progress: Progress, active: bool) -> None:
        pass

    def submit(self, round_: Round) -> None:
        self.round = round_


def save_by_ranks(path: Path, pieces_of_ranks: list[Pieces]) -> None:
    """What each rank writes and the coordinator publishes, for all ranks in turn, in this thread."""
    plannings = [_planning(_SavePieces(pieces)) for pieces in pieces_of_ranks]
    ranks = len(plannings)
    proposals = [planning.propose("", rank) for rank, planning in enumerate(plannings)]
    local.make_directories(path)
    claimed = claim(path, Neighbours(), True)
    rounds = []
    for rank, (planning, answer) in enumerate(
        zip(plannings, plannings[0].assign(proposals), strict=True)
    ):
        planning.take(answer)
        config, alone = WriterConfig(64 << 20), commit_group(ALONE)
        save = SaveOperation(alone, config, SaveOrigin.DCP, path, SaveStats(), {})
        group = _Group(RankSet(rank, tuple(range(ranks)), None))
        save.group = cast("CommitGroup", group)
        save.agree(Ticket(claimed.attempt, 0), claimed)
        begin_write(save, planning)()
        rounds.append(group.round)
    for each in rounds:
        assert each.part.wait(60)
        assert each.part.error is None
    reports = [each.report() for each in rounds]
    Place(path).publish(rounds[0], rounds[0].compose(reports, claimed, None))


def _planning(planner: _SavePieces) -> ObjectPlanning:
    return ObjectPlanning(planner, lambda _: planner.create_local_plan(), None)


def load_by_ranks(path: Path, pieces_of_ranks: list[Pieces]) -> None:
    """Fill the boxes of each rank, as ``dcp.load`` would there."""
    readers = [DataStatesReader(path) for _ in pieces_of_ranks]
    planners = [_LoadPieces(pieces) for pieces in pieces_of_ranks]
    plans = []
    for rank, (reader, planner) in enumerate(zip(readers, planners, strict=True)):
        metadata = reader.read_metadata()
        planner.set_up_planner({}, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
    plans = readers[0].prepare_global_plan(planners[0].create_global_plan(plans))
    for reader, planner, plan in zip(readers, planners, plans, strict=True):
        reader.read_data(planner.finish_plan(plan), planner).wait()


def reads_of_rows(*rows: tuple[Any, ...]) -> Reads:
    """What reads these ``rows``: name, file, begin, bytes in the file; of a tensor also its dtype, the sizes of the
    chunk, and the offsets and lengths of the region.
    """
    full = [row if len(row) > 4 else (*row, None, row[3:], (0,), row[3:]) for row in rows]
    names, files, *columns = zip(*full, strict=True) if full else [()] * 8
    begins, stored, dtypes, *ragged = columns
    paths = sorted(set(files))
    numbers = [*map(paths.index, files)], begins, stored, [*map(len, ragged[0])]
    flat = ([*itertools.chain.from_iterable(each)] for each in ragged)
    arrays = (np.array(each, np.int64) for each in (*numbers, *flat))
    return Reads(paths, [*names], [*dtypes], *arrays)
