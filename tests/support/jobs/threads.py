"""Ranks as threads of one process, over one store in memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dcp_datastates.ranks.rank_set import RankSet, of_store

SECONDS = 200.0


class MemoryStore:
    """All ranks are here, so their connections are one. It counts the ``requests`` to it."""

    def __init__(self) -> None:
        self.real: Any = dist.HashStore()  # type: ignore[attr-defined]
        self.requests = 0

    def clone(self) -> MemoryStore:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self.real.set_timeout(timeout)

    def __getattr__(self, request: str) -> Any:
        self.requests += 1
        return getattr(self.real, request)


class Impatient:
    """A check that raises ``error`` after so many looks."""

    def __init__(self, looks: int, error: Exception) -> None:
        self._looks = itertools.count(looks, -1)
        self._error = error

    def __call__(self) -> None:
        if next(self._looks) <= 0:
            raise self._error


def rank_set(world: int, store: MemoryStore) -> list[RankSet]:
    """Each rank's view of ``world`` ranks."""
    return [of_store(rank, tuple(range(world)), store) for rank in range(world)]


def together(ranks: Sequence[Any], work: Callable[[Any, int], Any]) -> list[Any]:
    """What ``work(each, rank)`` returns or raises for each of the ``ranks``, in threads of their own."""
    outcomes: list[Any] = [None] * len(ranks)

    def run(rank: int) -> None:
        try:
            outcomes[rank] = work(ranks[rank], rank)
        except BaseException as error:  # DCP has one that is no Exception
            outcomes[rank] = error.with_traceback(None)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a rank is stuck"
    return outcomes
