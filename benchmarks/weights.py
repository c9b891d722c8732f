"""What it costs to publish a model's weights after each save, beside other ways to write a Hugging Face folder.

    python benchmarks/weights.py [--parameters 60000000] [--turns 5] [--steps 40] [--rate 1e-5]

A loop of steps that wait as for a GPU (50 ms) saves a model in float32 and its AdamW moments, once in each turn of a
way; the folder has the model in bfloat16. All ways use the working directory's disk, and their data are durable when
the folder is counted as there. The ways:

- ``save``: the save alone.
- ``publish``, ``delta``: ``Weights``, of all tensors, and of what has changed.
- ``save_file``: the loop's thread converts the weights and writes them by safetensors, as ``save_pretrained`` does.
- ``consolidate``: the loop's thread calls ``dcp.save`` with ``HuggingFaceStorageWriter``, which consolidates.

Prints medians: milliseconds by which the steps of a turn took longer than the waits; seconds from the save's call until
the folder is there; processor seconds of a turn; bytes written for the folder; growth of the resident memory.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from bench.system import Peak, cpu_seconds, files_of, sync_tree
from dcp_datastates import CheckpointManager, Weights

_WAIT = 0.05
_WIDTH = 1024
INDEX = "model.safetensors.index.json"
WAYS = ("save", "publish", "delta", "save_file", "consolidate")


class Loop:
    """A model, its moments, and steps that change a weight by about ``rate``."""

    def __init__(self, parameters: int, rate: float) -> None:
        count = max(1, parameters // _WIDTH**2)
        self.model = torch.nn.Sequential(
            *(torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(count))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, fused=True)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.change()

    def change(self) -> None:
        for each in self.model.parameters():
            each.grad = torch.randn_like(each)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: each.bfloat16() for name, each in self.model.state_dict().items()}


def by_save_file(loop: Loop, path: Path) -> None:
    path.mkdir()
    save_file(loop.weights(), path / "model.safetensors")
    sync_tree(path)


def by_consolidation(loop: Loop, path: Path) -> None:
    weights = loop.weights()
    files = dict.fromkeys(weights, 1)
    writer = HuggingFaceStorageWriter(
        str(path), fqn_to_index_mapping=files, save_distributed=True, enable_consolidation=True
    )
    dcp.save(weights, storage_writer=writer)
    shutil.rmtree(path / "sharded", ignore_errors=True)
    sync_tree(path)


IN_THE_LOOP = {"save_file": by_save_file, "consolidate": by_consolidation}


def turn(
    way: str, loop: Loop, manager: CheckpointManager, number: int, steps: int, directory: Path
) -> dict[str, float]:
    """One save and the steps after it; the folder is the one of this ``number``."""
    loop.change()
    folder = directory / way / f"weight_v{number:06d}"
    peak, cpu, began = Peak(), cpu_seconds(), time.perf_counter()
    manager.save(number, loop.state)
    if way in IN_THE_LOOP:
        IN_THE_LOOP[way](loop, folder)
    there = time.perf_counter() - began if way in IN_THE_LOOP else 0.0
    for _ in range(steps):
        time.sleep(_WAIT)
        if not there and (folder / INDEX).exists():
            there = time.perf_counter() - began
    late = time.perf_counter() - began - steps * _WAIT
    manager.wait()
    return {
        "late": 1e3 * late,
        "there": there,
        "cpu": cpu_seconds() - cpu,
        "nbytes": sum(each.stat().st_size for each in files_of(folder)) / 1e6,
        "memory": peak.grown() / 2**20,
    }


def main(directory: Path, given: argparse.Namespace) -> None:
    loop = Loop(given.parameters, given.rate)
    managers = {}
    for way in WAYS:
        (directory / way).mkdir()
        publish = None
        if way in ("publish", "delta"):
            delta = "xor" if way == "delta" else None
            publish = Weights(directory / way, dtype="bfloat16", delta=delta, full_every=1000)
        managers[way] = CheckpointManager(
            directory / "run" / way, every=1, keep=1, publish=publish, save_last=False
        )
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(1, given.turns + 3):
        for way, manager in managers.items():
            cost = turn(way, loop, manager, number, given.steps, directory)
            if number > 2:  # the first save plans; the second one is the first delta
                found[way].append(cost)
    for manager in managers.values():
        manager.close()
    print(f"{'':12}{'late ms':>10}{'there s':>10}{'CPU s':>10}{'MB':>10}{'memory MiB':>12}")
    for way, costs in found.items():
        medians = [statistics.median(each[key] for each in costs) for key in costs[0]]
        print(f"{way:12}" + "{:10.0f}{:10.2f}{:10.2f}{:10.1f}{:12.0f}".format(*medians))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for option, default in (
        ("--parameters", 60_000_000),
        ("--turns", 5),
        ("--steps", 40),
        ("--rate", 1e-5),
    ):
        parser.add_argument(option, type=type(default), default=default)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=".") as path:
        main(Path(path), parser.parse_args())
