"""DCP's steps of all ranks together, without a process group of torch's."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.checkpoint.utils import _DistWrapper

__all__ = ["Ranks"]


class Ranks(_DistWrapper):
    """What ``_DistWrapper`` is to DCP, over functions that carry bytes: ``reduce_scatter`` is DCP's own.

    So if a step raises on any rank, DCP's ``CheckpointException`` with each rank's error is raised on all.

    Args:
        rank: this process's; the coordinator is 0.
        world: how many ranks there are.
        gather: all ranks' bytes on the coordinator, None elsewhere.
        scatter: this rank's one of the parts that the coordinator gives.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        gather: Callable[[bytes], list[bytes] | None],
        scatter: Callable[[Sequence[bytes] | None], bytes],
    ) -> None:
        super().__init__(None, use_dist=False, coordinator_rank=0)
        self.rank = rank
        self.is_coordinator = rank == 0
        self._world = world
        self._gather = gather
        self._scatter = scatter

    def get_world_size(self) -> int:
        return self._world

    def gather_object(self, object: Any) -> list[Any] | None:  # noqa: A002
        gathered = self._gather(pickle.dumps(object))
        return None if gathered is None else [pickle.loads(each) for each in gathered]

    def scatter_object(self, object_list: list[Any] | None) -> Any:
        parts: list[bytes] | None = None
        if object_list is not None:
            once: dict[int, bytes] = {}  # an error is the same object for all ranks
            for each in object_list:
                if id(each) not in once:
                    once[id(each)] = pickle.dumps(each)
            parts = [once[id(each)] for each in object_list]
        return pickle.loads(self._scatter(parts))
