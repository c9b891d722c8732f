"""How long one tensor of 10,000 takes to load, each time in a new process, after the imports: beside safetensors.

    python benchmarks/one_of_many.py [--turns 7]

10,000 tensors of 64 KiB in the working directory, in turns, cold (the kernel was asked to drop the files' pages) and
warm. Prints medians of milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import safe_open, save_file

from bench.system import drop, sync_tree, warm
from dcp_datastates import load, save

NAMES = [f"layers.{number // 10}.block.{number % 10}.weight" for number in range(10_000)]
NAME = NAMES[5_000]


def ours(path: Path) -> None:
    load(path, {NAME: torch.zeros(128, 128)})


def safetensors(path: Path) -> None:
    with safe_open(path / "model.safetensors", "pt") as file:
        torch.zeros(128, 128).copy_(file.get_tensor(NAME))


LOADERS: dict[str, Callable[[Path], None]] = {"ours": ours, "safetensors": safetensors}


def loaded_by(name: str, path: Path) -> float:
    """Milliseconds, in a new process."""
    command = [sys.executable, __file__, "--one", name, str(path)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main(directory: Path, turns: int) -> None:
    state = {name: torch.randn(128, 128) for name in NAMES}
    places = {name: directory / name for name in LOADERS}
    save(state, places["ours"])
    places["safetensors"].mkdir()
    save_file(state, places["safetensors"] / "model.safetensors")
    sync_tree(directory)
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(turns):
        for prepare in (drop, warm):
            for name, path in places.items():
                prepare(path)
                found.setdefault((name, prepare.__name__), []).append(loaded_by(name, path))
    for (name, prepared), times in found.items():
        how = "cold" if prepared == "drop" else "warm"
        print(f"{name:>12}, {how}: {statistics.median(times):6.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        begun = time.perf_counter()
        LOADERS[given.one[0]](Path(given.one[1]))
        print(1e3 * (time.perf_counter() - begun))
    else:
        with tempfile.TemporaryDirectory(dir=".") as here:
            main(Path(here).resolve(), given.turns)
