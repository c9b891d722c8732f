"""Processes that hold a workload each, and measure when told to.

The host cache belongs to a process and only ever grows, so each size of it needs a process of its
own. One measures at a time; the others wait for orders.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any, TypeAlias

import torch

from contenders import Contender, DataStates, Stock, StockStager
from measure import Sample, Situation, measure, measure_without_save
from stage_cost import StageCost, stage_cost
from workload import Workload

Contenders: TypeAlias = Callable[[], list[Contender]]


def stock_contenders() -> list[Contender]:
    return [Stock(threads=1), Stock(threads=4), StockStager(threads=4)]


@dataclass(frozen=True)
class DataStatesContender:
    """Makes one :class:`DataStates` (a class, as a closure does not travel to a process)."""

    host_cache_bytes: int

    def __call__(self) -> list[Contender]:
        return [DataStates(self.host_cache_bytes)]


class Worker:
    """Handle of a process that holds a workload of ``state_bytes`` and some contenders."""

    def __init__(
        self, context: SpawnContext, contenders: Contenders, state_bytes: int, threads: int
    ) -> None:
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, contenders, state_bytes, threads), daemon=True
        )
        self._process.start()
        theirs.close()
        self.names: list[str]
        self.nbytes: int
        self.names, self.nbytes = self._receive()

    def measure(self, contender: int, situation: Situation, path: Path) -> Sample:
        return self._ask("measure", contender, situation, path)

    def measure_without_save(self, situation: Situation) -> float:
        return self._ask("measure_without_save", situation)

    def close(self) -> None:
        self._connection.send(None)
        self._process.join()

    def _ask(self, *request: Any) -> Any:
        self._connection.send(request)
        return self._receive()

    def _receive(self) -> Any:
        answer = self._connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _serve(connection: Connection, make: Contenders, state_bytes: int, threads: int) -> None:
    torch.set_num_threads(threads)
    contenders = make()
    workload = Workload(state_bytes)
    connection.send(([contender.name for contender in contenders], workload.nbytes))
    while request := connection.recv():
        try:
            match request:
                case ("measure", contender, situation, path):
                    connection.send(measure(contenders[contender], workload, situation, path))
                case ("measure_without_save", situation):
                    connection.send(measure_without_save(workload, situation))
        except Exception as error:
            connection.send(RuntimeError(f"{request}: {type(error).__name__}: {error}"))
    for contender in contenders:
        contender.close()


def stage_costs(
    context: SpawnContext, directory: Path, sizes: list[int], saves: int
) -> list[StageCost]:
    """:func:`stage_cost` for each size, in a process of its own."""
    with context.Pool(1) as pool:
        return [pool.apply(stage_cost, (directory, size, saves)) for size in sizes]


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0))
