"""What ``convert`` takes from a file of ``torch.save``, beside what ``torch.load`` and a save take: seconds and memory.

Each round makes all conversions in turn. Figures are medians. See README.md.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import dcp_datastates

MIB = 1 << 20
STATES = {"10,000 x 4 KiB": (10_000, 4 << 10), "32 x 8 MiB": (32, 8 * MIB)}
TARGETS = ("datastates", "safetensors", "dcp", "torch")


def anonymous_bytes() -> int:
    """The process's memory that is no page of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10


def measured(call: Callable[[], object]) -> tuple[float, int]:
    """Seconds, and the most memory beyond what there was before."""
    before, most, over = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.005):
            most = max(most, anonymous_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    try:
        call()
    finally:
        seconds = time.perf_counter() - began
        over.set()
        watcher.join()
    return seconds, most


def rows(state: str, repeats: int, folder: Path) -> dict[str, list[tuple[float, int]]]:
    """The samples of each row."""
    count, nbytes = STATES[state]
    source, out = folder / "in.pt", folder / "out"
    torch.save({f"layers.{n}.weight": torch.randn(nbytes // 4) for n in range(count)}, source)
    calls: dict[str, Callable[[], object]] = {
        "torch.load": lambda: torch.load(source),
        "save(torch.load(mmap=True))": lambda: dcp_datastates.save(
            torch.load(source, mmap=True), out, no_dist=True, host_cache_size="64MiB"
        ),
    }
    for to in TARGETS:
        calls[f"convert to {to}"] = lambda to=to: dcp_datastates.convert(source, out, to)
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            found[name].append(measured(call))
            shutil.rmtree(out, ignore_errors=True) if out.is_dir() else out.unlink(missing_ok=True)
    return found


def main() -> None:
    """Print one line per row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to write (default: the temporary files')")
    options = parser.parse_args()
    for state in STATES:
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            for name, samples in rows(state, options.repeats, Path(folder)).items():
                seconds = statistics.median(second for second, _ in samples)
                most = statistics.median(memory for _, memory in samples) / MIB
                print(f"{state:16s} {name:30s} {seconds:8.2f} s {most:8.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
