"""DCP's collectives, without a process group of torch."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.checkpoint.utils import _DistWrapper

__all__ = ["Ranks"]


class Ranks(_DistWrapper):
    """A ``_DistWrapper`` of DCP over functions that carry bytes. It inherits DCP's ``reduce_scatter``.

    So if a step raises on any rank, all ranks raise DCP's ``CheckpointException`` with each rank's error.

    Args:
        rank: this process's rank; the coordinator is 0.
        gather: returns all ranks' bytes on the coordinator, None elsewhere.
        scatter: returns this rank's element of the parts that the coordinator passes.
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
            once: dict[int, bytes] = {}  # all ranks receive the same error object
            for each in object_list:
                if id(each) not in once:
                    once[id(each)] = pickle.dumps(each)
            parts = [once[id(each)] for each in object_list]
        return pickle.loads(self._scatter(parts))
