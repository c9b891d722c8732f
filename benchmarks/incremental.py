"""A save with 1 % trained beside a full one: seconds, bytes written, and the stall of training, in turn in one run.

python benchmarks/incremental.py /path/on/storage --gib 2
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from pathlib import Path

import torch

import dcp_datastates

_TENSORS = 200


def _written() -> int:
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["write_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    root = given.directory / "incremental-benchmark"
    elements = int(given.gib * 2**30 / 4 / _TENSORS)
    state = {f"layer.{n}": torch.nn.Parameter(torch.randn(elements)) for n in range(_TENSORS)}
    optimizer = torch.optim.SGD(state.values(), lr=0.1)
    dcp_datastates.track(optimizer)
    found: dict[str, list[tuple[float, int, float]]] = {"none": [], "unchanged": []}
    try:
        for number in range(given.repeats + 1):
            for reuse, results in found.items():
                for trained in range(_TENSORS // 100):
                    state[f"layer.{trained}"].grad = torch.ones(elements)
                written, begun = _written(), time.perf_counter()
                handle = dcp_datastates.async_save(
                    state, root / reuse, reuse=reuse, read_window="immediate"
                )
                optimizer.step()
                handle.result()
                seconds = time.perf_counter() - begun
                stall = handle.stats.stage_seconds + handle.stats.gate_seconds
                if number:  # the first of each writes all
                    results.append((seconds, _written() - written, stall))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for reuse, results in found.items():
        seconds, nbytes, stall = (statistics.median(each) for each in zip(*results, strict=True))
        print(
            f"reuse={reuse!r:12} {seconds:6.3f} s {nbytes / 2**20:8.1f} MiB written, stall {stall:.3f} s"
        )


if __name__ == "__main__":
    main()
