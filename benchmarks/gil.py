"""What a save takes from a training thread that runs Python: stock DCP, and this package with either planner.

``python benchmarks/gil.py``; see README.md.
"""

from __future__ import annotations

import argparse
import concurrent.futures.thread as pool
import dataclasses
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table

from dcp_datastates import DataStatesSavePlanner, DataStatesWriter
from dcp_datastates.worker import Worker
from machine import describe

_CACHE = "1GiB"


class BackgroundTime:
    """CPU seconds of DCP's thread and of the commit thread: no less than what they hold the GIL for."""

    def __init__(self) -> None:
        self._commit_thread: int | None = None
        self._dcp = 0.0
        self._began = 0.0
        run = pool._WorkItem.run

        def timed(item: Any) -> None:
            began = time.thread_time()
            try:
                run(item)
            finally:
                self._dcp += time.thread_time() - began

        pool._WorkItem.run = timed  # type: ignore[method-assign]
        work = Worker._run

        def noted(worker: Any) -> None:
            self._commit_thread = threading.get_native_id()
            work(worker)

        Worker._run = noted  # type: ignore[method-assign]

    def start(self) -> None:
        self._dcp, self._began = 0.0, self._commit_seconds()

    def seconds(self) -> float:
        return self._dcp + self._commit_seconds() - self._began

    def _commit_seconds(self) -> float:
        if self._commit_thread is None:
            return 0.0
        spent = Path(f"/proc/self/task/{self._commit_thread}/schedstat").read_text().split()[0]
        return int(spent) / 1e9


@dataclass(frozen=True)
class Sample:
    """One save."""

    progress: float
    """Of the training thread while the save is under way, over what it makes with none: 1 is untouched."""
    longest_pause: float
    """Seconds: the longest that the training thread came to nothing."""
    background: float
    """Seconds of CPU that DCP's and the commit thread took."""
    save: float
    """Seconds from the return of ``async_save`` to its end."""


Start = Callable[[dict[str, Any], Path], Future[Any]]


def count(seconds: float, done: Callable[[], bool]) -> tuple[int, float, float]:
    """Pure Python until ``done`` (or for ``seconds``): rounds, seconds, longest pause between two rounds."""
    rounds, longest = 0, 0.0
    began = last = time.perf_counter()
    while True:
        value = 0
        for number in range(200):
            value += number * number
        rounds += 1
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
        if now - began >= seconds or done():
            return rounds, now - began, longest


def sample(start: Start, state: dict[str, Any], path: Path, background: BackgroundTime) -> Sample:
    rounds, seconds, _ = count(0.3, lambda: False)
    free = rounds / seconds
    background.start()
    future = start(state, path)
    began = time.perf_counter()
    rounds, seconds, longest = count(600, future.done)
    saved = time.perf_counter() - began
    future.result()
    time.sleep(0.05)
    return Sample(rounds / seconds / free, longest, background.seconds(), saved)


def state_of(tensors: int, nbytes: int) -> dict[str, Any]:
    """Nested, as jobs have it: parameters and their momenta, owned by an optimizer that has stepped."""
    parameters = [torch.nn.Parameter(torch.randn(nbytes // 4)) for _ in range(tensors // 2)]
    optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {
        "model": {f"layer.{index}": each.detach() for index, each in enumerate(parameters)},
        "optimizer": {
            f"layer.{index}": optimizer.state[each]["momentum_buffer"]
            for index, each in enumerate(parameters)
        },
        "step": 1,
    }


def contenders() -> dict[str, Start]:
    ours = DataStatesSavePlanner()
    with_stock = DataStatesWriter(host_cache_size=_CACHE, read_window="immediate")
    with_ours = DataStatesWriter(host_cache_size=_CACHE, read_window="immediate")

    def stock(state: dict[str, Any], path: Path) -> Any:
        return dcp.async_save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=4))

    def stock_cached(state: dict[str, Any], path: Path) -> Any:
        return dcp.async_save(
            state,
            storage_writer=dcp.FileSystemWriter(path, thread_count=4),
            planner=dcp.DefaultSavePlanner(enable_plan_caching=True),
        )

    def stock_planner(state: dict[str, Any], path: Path) -> Any:
        return dcp.async_save(state, checkpoint_id=path, storage_writer=with_stock)

    def both_ours(state: dict[str, Any], path: Path) -> Any:
        return dcp.async_save(state, checkpoint_id=path, storage_writer=with_ours, planner=ours)

    return {
        "FileSystemWriter": stock,
        "FileSystemWriter, plan cache": stock_cached,
        "DataStatesWriter, default planner": stock_planner,
        "DataStatesWriter, DataStatesSavePlanner": both_ours,
    }


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tensors", type=int, default=1000)
    arguments.add_argument("--kib", type=int, default=128, help="of each tensor")
    arguments.add_argument("--repeats", type=int, default=7)
    arguments.add_argument("--dir", type=Path, help="where the checkpoints go")
    arguments.add_argument("--json", type=Path, help="where the samples go")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    background = BackgroundTime()
    state = state_of(options.tensors, options.kib << 10)
    directory = Path(tempfile.mkdtemp(prefix="gil-", dir=options.dir))
    samples: dict[str, list[Sample]] = {}
    each = contenders()
    try:
        for repeat in range(
            options.repeats + 2
        ):  # two rounds to warm up: the second learns the layout
            for name, start in each.items():
                path = directory / f"c{len(name)}-{repeat}"
                found = sample(start, state, path, background)
                shutil.rmtree(path)
                if repeat >= 2:
                    samples.setdefault(name, []).append(found)
        show(samples, options.tensors)
        if options.json is not None:
            document = {
                **describe(directory),
                "tensors": options.tensors,
                "kib": options.kib,
                "samples": {
                    n: [dataclasses.asdict(s) for s in each] for n, each in samples.items()
                },
            }
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    finally:
        shutil.rmtree(directory)
    return 0


def show(samples: dict[str, list[Sample]], tensors: int) -> None:
    table = Table(title=f"{tensors} tensors, one rank; medians")
    for column in ("", "progress", "longest pause", "background CPU", "per 1,000 tensors", "save"):
        table.add_column(column, justify="left" if not column else "right")
    for name, each in samples.items():
        background = median(one.background for one in each)
        table.add_row(
            name,
            f"{median(one.progress for one in each):.2f}",
            f"{1e3 * median(one.longest_pause for one in each):.1f} ms",
            f"{1e3 * background:.1f} ms",
            f"{1e6 * background / tensors:.1f} ms",
            f"{1e3 * median(one.save for one in each):.0f} ms",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
