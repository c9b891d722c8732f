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
from dcp_datastates.process.worker import Worker
from machine import describe

_CACHE = "1GiB"
_TAIL = 0.05
"""Seconds."""
_WARM_UP = 2
"""Saves: the second learns the layout."""


class BackgroundTime:
    """CPU seconds of DCP's thread and of the commit thread: they do not compute with the GIL for longer."""

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
    taken: float
    """Seconds by which the training thread is behind for the save: others held the GIL, or its core."""
    longest_pause: float
    """Seconds: the longest that the training thread came to nothing."""
    background: float
    """Seconds of CPU that DCP's and the commit thread took, system calls without the GIL included."""
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
    rounds, saved, longest = count(600, future.done)
    after, tail, _ = count(_TAIL, lambda: False)  # what is left to do once the future is done
    future.result()
    taken = saved + tail - (rounds + after) / free
    return Sample(rounds / saved / free, taken, longest, background.seconds(), saved)


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
    arguments.add_argument("--tensors", type=int, nargs="+", default=[1000])
    arguments.add_argument("--kib", type=int, default=128, help="of each tensor")
    arguments.add_argument("--repeats", type=int, default=7)
    arguments.add_argument("--dir", type=Path, help="where the checkpoints go")
    arguments.add_argument("--json", type=Path, help="where the samples go")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    background = BackgroundTime()
    directory = Path(tempfile.mkdtemp(prefix="gil-", dir=options.dir))
    samples: dict[int, dict[str, list[Sample]]] = {}
    try:
        for tensors in options.tensors:
            state = state_of(tensors, options.kib << 10)
            samples[tensors] = measure(state, options.repeats, directory, background)
            show(samples[tensors], tensors)
        show_growth(samples)
        if options.json is not None:
            document = {
                **describe(directory),
                "kib": options.kib,
                "samples": {
                    tensors: {n: [dataclasses.asdict(s) for s in of] for n, of in each.items()}
                    for tensors, each in samples.items()
                },
            }
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    finally:
        shutil.rmtree(directory)
    return 0


def measure(
    state: dict[str, Any], repeats: int, directory: Path, background: BackgroundTime
) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {}
    each = contenders()
    for repeat in range(repeats + _WARM_UP):
        for name, start in each.items():
            path = directory / f"c{len(name)}-{repeat}"
            found = sample(start, state, path, background)
            shutil.rmtree(path)
            if repeat >= _WARM_UP:
                samples.setdefault(name, []).append(found)
    return samples


def show(samples: dict[str, list[Sample]], tensors: int) -> None:
    table = Table(title=f"{tensors} tensors, one rank; medians")
    for column in ("", "progress", "taken", "longest pause", "background CPU", "save"):
        table.add_column(column, justify="left" if not column else "right")
    for name, each in samples.items():
        table.add_row(
            name,
            f"{median(one.progress for one in each):.2f}",
            f"{1e3 * median(one.taken for one in each):.1f} ms",
            f"{1e3 * median(one.longest_pause for one in each):.1f} ms",
            f"{1e3 * median(one.background for one in each):.1f} ms",
            f"{1e3 * median(one.save for one in each):.0f} ms",
        )
    Console(width=120).print(table)


def show_growth(samples: dict[int, dict[str, list[Sample]]]) -> None:
    """What a further 1,000 tensors take: the fixed part of a save falls out."""
    few, many = min(samples), max(samples)
    if few == many:
        return
    for name in samples[few]:
        taken = [median(one.taken for one in samples[tensors][name]) for tensors in (few, many)]
        per_thousand = 1e6 * (taken[1] - taken[0]) / (many - few)
        Console(width=120).print(f"{name}: {per_thousand:.1f} ms for each further 1,000 tensors")


if __name__ == "__main__":
    sys.exit(main())
