"""What change detection adds to a save: to the call, and to the flush.

    python benchmarks/detection_cost.py --gib 2 --saves 15

The same state is saved with change detection and without it (a patch that only this benchmark makes), in turns, in one
process. "stall" is the state of stall.py; "many" has 1,000 tensors of 128 KiB, for which detection is dearest.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

import dcp_datastates
from dcp_datastates._native import ExpectedBytes
from dcp_datastates.staging import change_detection, deferred_reads, stage
from machine import describe
from workload import Workload

WARM_UP = 2


@contextmanager
def _undetected() -> Iterator[None]:
    """Saves without words, counters and places of threads."""
    changes: list[tuple[Any, str, Any]] = [
        (stage.Expectation, "look", lambda *_: ExpectedBytes()),
        (change_detection.Portion, "_writable", lambda _: []),
        (deferred_reads, "places", dict),
    ]
    before = [getattr(of, name) for of, name, _ in changes]
    for of, name, to in changes:
        setattr(of, name, to)
    yield
    for (of, name, _), was in zip(changes, before, strict=True):
        setattr(of, name, was)


@contextmanager
def _detected() -> Iterator[None]:
    yield


WAYS = {"with": _detected, "without": _undetected}


def _many() -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    parameters = [torch.nn.Parameter(torch.randn(32 << 10)) for _ in range(1000)]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    return optimizer, {f"parameter.{index}": p.detach() for index, p in enumerate(parameters)}


def measure(state: dict[str, Any], directory: Path, saves: int) -> dict[str, dict[str, float]]:
    """Medians, in milliseconds: of the call, and of the processor from the call to the commit; with detection, without,
    and of the differences between saves that follow each other, which depend less on what else the machine does.
    """
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for number in range(WARM_UP + saves):
        for name in (list(WAYS), list(WAYS)[::-1])[number % 2]:
            path = directory / name
            with WAYS[name]():
                busy, began = time.process_time(), time.perf_counter()
                handle = dcp_datastates.async_save(
                    state, path, host_cache_size="512MiB", read_window="immediate"
                )
                call = time.perf_counter() - began
                handle.result()
                spent[name].append((call * 1e3, (time.process_time() - busy) * 1e3))
    found = {}
    for place, figure in enumerate(("call_ms", "processor_ms")):
        there, gone = ([each[place] for each in spent[name][WARM_UP:]] for name in WAYS)
        found[figure] = {
            "with": median(there),
            "without": median(gone),
            "added": median(a - b for a, b in zip(there, gone, strict=True)),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state of stall.py")
    parser.add_argument("--saves", type=int, default=15)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="detection-", dir=arguments.directory))
    results: dict[str, Any] = describe(directory)
    try:
        workload = Workload(int(arguments.gib * (1 << 30)))
        dcp_datastates.track(workload.optimizer)
        optimizer, state = _many()
        dcp_datastates.track(optimizer)
        for name, saved in (("stall", workload.state_dict()), ("many", state)):
            results[name] = measured = measure(saved, directory, arguments.saves)
            for figure in ("call_ms", "processor_ms"):
                ways = measured[figure]
                part = ways["added"] / ways["without"]
                print(
                    f"{name:6} {figure:13} {ways['without']:8.2f} {ways['added']:+8.2f} {part:+.1%}"
                )
    finally:
        shutil.rmtree(directory)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
