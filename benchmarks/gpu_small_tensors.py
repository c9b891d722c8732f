"""How fast many small tensors come from a GPU: with this engine's copy kernel, without it, and as one bare copy.

    python benchmarks/gpu_small_tensors.py --dir /mnt/nvme --json results.json --png results.png

See benchmarks/README.md for what the figures mean. ``--smoke`` takes few tensors, on the host: a check of this script.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

import dcp_datastates
from apart import measured_apart
from dcp_datastates import DataStatesWriter
from dcp_datastates.engine import engine
from gpu_copies import BareCopy, prepare
from gpu_output import drawable, gpu, print_table, write_json
from machine import describe

_KIB = (1, 4, 16, 64, 256)
_WARM_UPS = 3  # from the third on, a save of a structure is read before it is planned
_KERNELS = {"copy kernel": "1", "no copy kernel": "0"}
"""The variants, and what DCP_DATASTATES_COPY_KERNEL is for each."""
_BARE = "bare copy"


@dataclass
class Sizes:
    """Of tensors of one size. Seconds; an entry per save."""

    kib: int
    nbytes: int
    """In all."""
    eager_bytes: int = 0
    """Copied at the call instead, in the last save."""
    reads: list[float] = field(default_factory=list)
    """From when the engine is told what to read until all is in the host cache."""
    captures: list[float] = field(default_factory=list)
    """From the call to ``captured``: planning is in it."""
    bare: list[float] = field(default_factory=list)
    """One pinned ``copy_`` of as many bytes."""


@dataclass
class Outcome:
    """Of one process."""

    device: dict[str, Any]
    has_copy_kernel: bool
    kernel_fault: str | None
    pin_fault: str | None
    sizes: list[Sizes] = field(default_factory=list)

    @staticmethod
    def of(document: dict[str, Any]) -> Outcome:
        return Outcome(**{**document, "sizes": [Sizes(**each) for each in document["sizes"]]})


def measure(options: argparse.Namespace) -> Outcome:
    device = "cpu" if options.smoke else "cuda"
    cache = (64 << 20) if options.smoke else (2 << 30)
    native = engine(cache)
    prepare(native, device)
    outcome = Outcome(
        gpu(),
        not options.smoke and native.has_copy_kernel(torch.cuda.current_device()),
        None if native.kernel_fault is None else native.kernel_fault.message,
        None if native.pin_fault is None else native.pin_fault.message,
    )
    writer = DataStatesWriter(host_cache_size=cache, read_window="immediate")
    for kib in _KIB:
        outcome.sizes.append(measure_size(kib, device, writer, options))
    writer.close()
    return outcome


def measure_size(
    kib: int, device: str, writer: DataStatesWriter, options: argparse.Namespace
) -> Sizes:
    count = 16 if options.smoke else 4096
    tensors = [torch.nn.Parameter(torch.randn(kib << 8, device=device)) for _ in range(count)]
    optimizer = torch.optim.SGD(tensors, lr=0.1)
    dcp_datastates.track(optimizer)
    state = {f"{number}": tensor for number, tensor in enumerate(tensors)}
    found = Sizes(kib, sum(tensor.nbytes for tensor in tensors))
    bare = BareCopy(found.nbytes, device)
    for number in range(_WARM_UPS + options.saves):
        if device == "cuda":
            torch.cuda.synchronize()
        path = options.dir / f"{kib}-{number}"
        began = time.perf_counter()
        response = dcp_datastates.async_save(state, path, writer=writer)
        writer.captured.result()
        captured = time.perf_counter() - began
        response.upload_completion.result()
        shutil.rmtree(path)
        stats = writer.last_save
        assert stats is not None
        found.eager_bytes = stats.eager_bytes
        if number >= _WARM_UPS:
            found.reads.append(stats.read_seconds)
            found.captures.append(captured)
            found.bare.append(bare.seconds())
    return found


def take_turns(options: argparse.Namespace, directory: Path) -> dict[str, list[Outcome]] | None:
    """Each variant in a process of its own, because the engine asks for the kernel once; None if one failed."""
    results: dict[str, list[Outcome]] = {name: [] for name in _KERNELS}
    for round_ in range(options.repeats):
        for name, wanted in _KERNELS.items():
            print(f"--- {name}, round {round_ + 1}", flush=True)
            arguments = [*sys.argv[1:], "--dir", str(directory)]
            document = measured_apart(__file__, arguments, 120, DCP_DATASTATES_COPY_KERNEL=wanted)
            for left_over in directory.iterdir():
                shutil.rmtree(left_over, ignore_errors=True)
            if document is None:
                return None
            outcome = Outcome.of(document)
            if not options.smoke and outcome.has_copy_kernel != (wanted == "1"):
                print(f"WARNING: the kernel is not used: {outcome.kernel_fault}", flush=True)
            results[name].append(outcome)
    return results


def rates(results: dict[str, list[Outcome]]) -> dict[str, dict[int, float]]:
    """Median bytes per second, by variant and KiB."""
    found: dict[str, dict[int, float]] = {}
    for position, kib in enumerate(_KIB):
        for name, outcomes in results.items():
            sizes = [outcome.sizes[position] for outcome in outcomes]
            seconds = median(x for each in sizes for x in each.reads)
            found.setdefault(name, {})[kib] = sizes[0].nbytes / seconds
        sizes = [outcome.sizes[position] for each in results.values() for outcome in each]
        seconds = median(x for each in sizes for x in each.bare)
        found.setdefault(_BARE, {})[kib] = sizes[0].nbytes / seconds
    return found


def show(results: dict[str, list[Outcome]], found: dict[str, dict[int, float]]) -> None:
    first = results["copy kernel"][0]
    rows = []
    for position, kib in enumerate(_KIB):
        row = [f"{kib} KiB", f"{first.sizes[position].nbytes / (1 << 20):.0f} MiB"]
        row += [f"{found[name][kib] / 1e9:.2f}" for name in (*_KERNELS, _BARE)]
        for name in _KERNELS:
            captures = [x for each in results[name] for x in each.sizes[position].captures]
            row.append(f"{1e3 * median(captures):.1f}")
        rows.append(row)
    header = ["each", "all", *_KERNELS, _BARE, "call to captured, ms", "without the kernel"]
    print_table(f"{first.device['device']}, D2H in GB/s, medians", header, rows)


def draw(found: dict[str, dict[int, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4))
    for name, by_size in found.items():
        axis.plot(list(by_size), [rate / 1e9 for rate in by_size.values()], marker="o", label=name)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("KiB of each tensor")
    axis.set_ylabel("GB/s from the device")
    axis.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--dir", type=Path, help="where the checkpoints go; 2 GiB")
    arguments.add_argument("--saves", type=int, default=5, help="of each size, in one process")
    arguments.add_argument("--repeats", type=int, default=2, help="processes of each")
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--png", type=Path)
    arguments.add_argument("--smoke", action="store_true")
    arguments.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.into is not None:
        options.into.write_text(json.dumps(asdict(measure(options))))
        return 0
    if not options.smoke and not torch.cuda.is_available():
        arguments.error("there is no GPU; --smoke takes tensors on the host")
    options.png = drawable(options.png)
    directory = Path(tempfile.mkdtemp(prefix="gpu-small-tensors-", dir=options.dir))
    try:
        machine = describe(directory)
        results = take_turns(options, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if results is None:
        return 1
    found = rates(results)
    show(results, found)
    if options.json is not None:
        document = {
            **machine,
            **results["copy kernel"][0].device,
            "benchmark": "gpu_small_tensors",
            "rates": found,
            "outcomes": {name: list(map(asdict, each)) for name, each in results.items()},
        }
        write_json(options.json, document)
    if options.png is not None:
        draw(found, options.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
