"""How long the background threads of a steady save hold the GIL: sampled from outside by py-spy.

``python benchmarks/gil_held.py``; see README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gil import Start, contenders, state_of
from machine import describe

_RATE = 1000
"""Samples a second."""


@contextmanager
def holders(found: Counter[str], functions: Counter[str]) -> Iterator[None]:
    """Counts, of this process's samples while it is entered, those in which a thread but this one held the GIL."""
    with tempfile.NamedTemporaryFile(suffix=".raw") as stacks:
        command = f"py-spy record --pid {os.getpid()} --gil --threads --nonblocking --rate {_RATE}"
        command += f" --duration 3600 --format raw --output {stacks.name}"
        sampler = subprocess.Popen(
            command.split(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        time.sleep(1)  # until it samples
        if sampler.poll() is not None:
            raise RuntimeError(f"py-spy cannot read this process: {sampler.stderr.read()!r}")
        try:
            yield
        finally:
            sampler.send_signal(signal.SIGINT)
            sampler.communicate(timeout=60)
        for line in Path(stacks.name).read_text().splitlines():
            stack, _, samples = line.rpartition(" ")
            thread, *frames = stack.split(";")
            if "MainThread" not in thread:
                found[thread] += int(samples)
                functions[frames[-1] if frames else "?"] += int(samples)


def held(
    start: Start, state: dict[str, Any], saves: int, directory: Path
) -> tuple[float, Counter[str]]:
    """Seconds a save, and the innermost functions by samples."""
    threads: Counter[str] = Counter()
    functions: Counter[str] = Counter()

    def save(index: int) -> None:
        done = threading.Event()
        future = start(state, directory / f"{index}")
        future.add_done_callback(lambda _: done.set())
        done.wait()
        time.sleep(0.02)  # what is left to do once the future is done
        future.result()
        shutil.rmtree(directory / f"{index}")

    for index in range(3):
        save(index)
    with holders(threads, functions):
        for index in range(saves):
            save(index)
    return sum(threads.values()) / _RATE / saves, functions


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tensors", type=int, nargs="+", default=[1000, 4000])
    arguments.add_argument("--kib", type=int, default=64, help="of each tensor")
    arguments.add_argument("--saves", type=int, default=200, help="a tenth of them for the others")
    arguments.add_argument("--functions", type=int, default=0, help="how many to print")
    arguments.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where the files go")
    arguments.add_argument("--json", type=Path, help="where the figures go")
    options = arguments.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="gil-held-", dir=options.dir))
    figures: dict[str, dict[int, float]] = {}
    try:
        for tensors in options.tensors:
            state = state_of(tensors, options.kib << 10)
            for name, start in contenders().items():
                ours = "SavePlanner" in name
                saves = options.saves if ours else options.saves // 10
                seconds, functions = held(start, state, saves, directory)
                figures.setdefault(name, {})[tensors] = seconds
                for function, samples in functions.most_common(options.functions if ours else 0):
                    print(f"{1e3 * samples / _RATE / saves:8.3f} ms  {function}")
        show(figures)
        if options.json is not None:
            document = {**describe(directory), "kib": options.kib, "saves": options.saves}
            document["held_seconds"] = figures
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    finally:
        shutil.rmtree(directory)
    return 0


def show(figures: dict[str, dict[int, float]]) -> None:
    table = Table(title="the GIL, held by background threads during one save")
    table.add_column("")
    sizes = sorted({tensors for each in figures.values() for tensors in each})
    for tensors in sizes:
        table.add_column(f"{tensors} tensors", justify="right")
    for name, each in figures.items():
        table.add_row(name, *(f"{1e3 * each[tensors]:.1f} ms" for tensors in sizes))
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
