"""The parts of the report, each in a process of its own: ``python -m bench.parts NAME --into FILE``."""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import loads, memory, saves, training
from bench.samples import Table, summary
from bench.savers import start_process_group


@dataclass(frozen=True)
class Sizes:
    scales: dict[str, float]
    """Of the states (1: about 1 GB, or 10,000 tensors)."""
    rounds: int
    """Of large tensors and of an LLM's shapes."""
    other_rounds: int
    train_scale: float
    train_rounds: int
    sleep: float
    """Seconds of an iteration of training."""
    most: float
    """Seconds of the longest iteration that is tried."""


FULL = Sizes({"large": 1, "llm": 0.7, "many64k": 1, "many4k": 1}, 5, 3, 0.07, 3, 0.1, 2.0)
QUICK = Sizes(
    {"large": 0.125, "llm": 0.06, "many64k": 0.1, "many4k": 0.1}, 3, 2, 0.03, 2, 0.02, 0.4
)
TINY = Sizes(
    {"large": 0.03, "llm": 0.01, "many64k": 0.001, "many4k": 0.001}, 1, 1, 0.002, 1, 0.001, 0.02
)
SIZES = {"full": FULL, "quick": QUICK, "tiny": TINY}


def _saves(sizes: Sizes, directory: Path) -> Iterator[Table]:
    for case, scale in sizes.scales.items():
        rounds = sizes.rounds if case in ("large", "llm") else sizes.other_rounds
        yield saves.measure(case, scale, rounds, directory)


def _loads(sizes: Sizes, directory: Path) -> Iterator[Table]:
    many = sizes.scales["many64k"]
    yield loads.measure("large", sizes.scales["large"], sizes.rounds, directory)
    yield loads.measure("many64k", many, sizes.other_rounds, directory)
    yield loads.measure("many64k", many, sizes.other_rounds, directory, one=True)
    yield loads.measure("many4k", sizes.scales["many4k"], sizes.other_rounds, directory)


def _memory(sizes: Sizes, directory: Path) -> Iterator[Table]:
    yield memory.measure("llm", sizes.scales["llm"], directory)


def _training(sizes: Sizes, directory: Path) -> Iterator[Table]:
    table = training.measure_intervals(
        sizes.train_scale, sizes.train_rounds, directory, sizes.sleep
    )
    table.facts["start"] = training.start_seconds(sizes.train_rounds)
    yield table
    yield training.measure_shortest(sizes.train_scale, sizes.train_rounds, directory, sizes.most)


PARTS: dict[str, Callable[[Sizes, Path], Iterator[Table]]] = {
    "saves": _saves,
    "memory": _memory,
    "loads": _loads,
    "training": _training,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--sizes", choices=SIZES, required=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    faulthandler.enable()
    # By descriptors, stock's stager and torch_checkpointing take one for each tensor.
    torch.multiprocessing.set_sharing_strategy("file_system")
    start_process_group()
    found = []
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        begun = time.monotonic()
        for table in PARTS[arguments.part](SIZES[arguments.sizes], Path(directory)):
            found.append(summary(table))
            arguments.into.write_text(
                json.dumps(found)
            )  # what is measured stays if the rest crashes
            print(f"  {table.title}: {time.monotonic() - begun:.0f} s", flush=True)
            begun = time.monotonic()
    sys.stdout.flush()
    os._exit(0)  # threads and processes of peers do not hold it up


if __name__ == "__main__":
    main()
