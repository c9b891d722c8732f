"""From the start of a process to its first step: the newest checkpoint in memory (/dev/shm), and on disk, in turns.

    python benchmarks/restart.py [--gb 1] [--turns 5] [--json FILE]

Each turn starts a new process for each tier. It imports torch and this package, finds the newest checkpoint, loads it
with all checksums compared, and takes a step. The disk's pages are dropped before. Beside it: a process that only
imports, and one that reads the disk's file by ``torch.load``. Prints medians and ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import dcp_datastates

TENSORS = 64

PROGRAM = """
import sys, time
began = float(sys.argv[1])
import torch, dcp_datastates
imported = time.time() - began
kind, place, elements = sys.argv[2], sys.argv[3], int(sys.argv[4])
model = torch.nn.ParameterList([torch.empty(elements) for _ in range(64)])
state = {"model": {f"w{i}": p.detach() for i, p in enumerate(model)}}
before = time.time()
if kind == "package":
    dcp_datastates.load(dcp_datastates.latest(place), state)
elif kind == "torch":
    for name, value in torch.load(place, weights_only=True)["model"].items():
        state["model"][name].copy_(value)
loaded = time.time()
with torch.no_grad():
    for p in model:
        p.add_(1e-3)
print(imported, loaded - before, time.time() - began)
"""


def drop(path: Path) -> None:
    """Have the files below ``path`` read from storage next time."""
    os.sync()
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def once(kind: str, place: Path, elements: int) -> list[float]:
    """Seconds: until imported, of the load, and from the start of the process to the end of the step."""
    command = [sys.executable, "-c", PROGRAM, repr(time.time()), kind, str(place), str(elements)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(each) for each in ended.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=Path("build"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    elements = int(given.gb * 1e9) // 4 // TENSORS
    state = {"model": {f"w{i}": torch.randn(elements) for i in range(TENSORS)}}
    disk = Path(tempfile.mkdtemp(prefix="restart-", dir=given.disk))
    memory = Path(tempfile.mkdtemp(prefix="restart-", dir="/dev/shm"))
    try:
        for root in (disk, memory):
            dcp_datastates.save(state, root / "run/step-1")
        torch.save(state, disk / "state.pt")
        del state
        cases = {
            "memory": ("package", memory / "run"),
            "disk": ("package", disk / "run"),
            "torch.load from the disk": ("torch", disk / "state.pt"),
            "imports alone": ("none", disk),
        }
        seconds: dict[str, list[list[float]]] = {name: [] for name in cases}
        for _ in range(given.turns):
            for name, (kind, place) in cases.items():
                drop(disk)
                seconds[name].append(once(kind, place, elements))
    finally:
        shutil.rmtree(disk)
        shutil.rmtree(memory)
    medians = {
        name: [round(statistics.median(column), 3) for column in zip(*found, strict=True)]
        for name, found in seconds.items()
    }
    base = medians["disk"][2]
    print(f"{'':26} imports    load   to the first step   (of the disk's)")
    for name, (imports, load, total) in medians.items():
        print(f"{name:26} {imports:7.2f} {load:7.2f} {total:19.2f}   ({total / base:.2f})")
    if given.json:
        about = {"gb": given.gb, "turns": given.turns, "torch": torch.__version__}
        given.json.write_text(json.dumps({**about, "seconds": medians}, indent=1) + "\n")


if __name__ == "__main__":
    main()
