"""What saving takes from a transformer that keeps a GPU busy: no saves, stock ``async_save``, and this package.

    python benchmarks/gpu_training.py --dir /mnt/nvme --json results.json --png results.png

See benchmarks/README.md for what the figures mean. ``--smoke`` runs a tiny model on the host: a check of this script.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.nn import functional

import dcp_datastates
from dcp_datastates import DataStatesWriter
from disk import raw_write_rate
from machine import describe

_SEED = 1234


@dataclass(frozen=True)
class Shape:
    """Of the model, and of what it is fed."""

    width: int = 2048
    layers: int = 22
    heads: int = 16
    vocabulary: int = 32000
    sequence: int = 1024
    batch: int = 8
    device: str = "cuda"


SMOKE = Shape(width=64, layers=2, heads=2, vocabulary=100, sequence=16, batch=2, device="cpu")


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(2))
        self.mix = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.wide = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.mix(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: torch.Tensor = x + self.narrow(functional.gelu(self.wide(self.norms[1](x))))
        return result


class Job:
    """A model, its AdamW, and one iteration after another; the same from one seed."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(_SEED)
        self.shape = shape
        self.model = nn.Sequential(
            nn.Embedding(shape.vocabulary, shape.width),
            *(Block(shape) for _ in range(shape.layers)),
            nn.Linear(shape.width, shape.vocabulary, bias=False),
        ).to(shape.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        dcp_datastates.track(self.optimizer)
        self.losses: list[torch.Tensor] = []
        self.number = 0

    def forward_backward(self) -> None:
        generator = torch.Generator().manual_seed(_SEED + self.number)
        self.number += 1
        size = (self.shape.batch, self.shape.sequence + 1)
        tokens = torch.randint(self.shape.vocabulary, size, generator=generator)
        tokens = tokens.to(self.shape.device)
        with torch.autocast(self.shape.device, torch.bfloat16):
            logits = self.model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        self.losses.append(loss.detach())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        slots = {names[p]: dict(s) for p, s in self.optimizer.state.items()}
        return {"model": self.model.state_dict(), "optimizer": slots, "step": self.number}


class Contender:
    """Saves a job's state; ``before_step`` is where torchtitan waits for staging."""

    name = "no saving"

    def save(self, state: dict[str, Any], path: Path) -> Future[Any] | None:
        return None

    def before_step(self) -> None:
        pass

    def close(self) -> None:
        pass


class Stock(Contender):
    name = "stock async_save"

    def save(self, state: dict[str, Any], path: Path) -> Future[Any] | None:
        return _future(dcp.async_save(state, storage_writer=_stock_writer(path)))


class StockPinned(Contender):
    name = "stock, DefaultStager, pinned"

    def __init__(self, on_gpu: bool) -> None:
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=True,
                use_async_staging=True,
                use_non_blocking_copy=on_gpu,
            )
        )
        self.staging: Any = None

    def save(self, state: dict[str, Any], path: Path) -> Future[Any] | None:
        response: Any = dcp.async_save(
            state,
            storage_writer=_stock_writer(path),
            async_stager=self.stager,
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
        )
        self.staging = response.staging_completion
        return _future(response.upload_completion)

    def before_step(self) -> None:
        if self.staging is not None:
            self.staging.result()
            self.staging = None

    def close(self) -> None:
        self.stager.close()


class Ours(Contender):
    name = "DataStatesWriter"

    def __init__(self, cache: int) -> None:
        self.writer = DataStatesWriter(host_cache_size=cache)

    def save(self, state: dict[str, Any], path: Path) -> Future[Any] | None:
        return dcp_datastates.async_save(state, path, writer=self.writer).upload_completion

    def close(self) -> None:
        self.writer.close()


def _stock_writer(path: Path) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(path, thread_count=4)


def _future(found: Any) -> Future[Any]:
    assert isinstance(found, Future)
    return found


@dataclass
class Sample:
    """One stretch of iterations with one contender. Seconds, bytes."""

    iteration: float = 0.0
    """Mean, with one synchronization at the end of the stretch."""
    calls: list[float] = field(default_factory=list)
    """In ``async_save``."""
    waits: list[float] = field(default_factory=list)
    """Of the host before and in ``optimizer.step()``, in iterations with a save."""
    commits: list[float] = field(default_factory=list)
    read_rates: list[float] = field(default_factory=list)
    """Bytes per second from the device, of saves by ours."""
    peak_memory: int = 0
    losses: list[float] = field(default_factory=list)


def stretch(
    contender: Contender, shape: Shape, iterations: int, every: int, directory: Path
) -> Sample:
    job = Job(shape)
    for _ in range(2):  # makes the optimizer's state, and warms up
        job.forward_backward()
        job.step()
    first = contender.save(job.state(), directory / "warm-up")
    if first is not None:
        first.result()
    sample = Sample()
    in_flight: list[tuple[Future[Any], Path]] = []
    _reset_peak_memory()
    _synchronize(shape)
    began = time.perf_counter()
    for number in range(iterations):
        saving = number % every == 0
        if saving:
            at = time.perf_counter()
            path = directory / f"{number}"
            future = contender.save(job.state(), path)
            sample.calls.append(time.perf_counter() - at)
            if future is not None:
                future.add_done_callback(
                    lambda _, at=at: sample.commits.append(time.perf_counter() - at)
                )
                in_flight.append((future, path))
        job.forward_backward()
        at = time.perf_counter()
        contender.before_step()
        job.step()
        if saving:
            sample.waits.append(time.perf_counter() - at)
        while len(in_flight) > 1:  # as jobs do: no more than two under way
            _finish(*in_flight.pop(0), contender, sample)
    _synchronize(shape)
    sample.iteration = (time.perf_counter() - began) / iterations
    for each in in_flight:
        _finish(*each, contender, sample)
    sample.peak_memory = _peak_memory()
    sample.losses = [float(loss) for loss in job.losses]
    shutil.rmtree(directory / "warm-up", ignore_errors=True)
    return sample


def _finish(future: Future[Any], path: Path, contender: Contender, sample: Sample) -> None:
    future.result()
    if isinstance(contender, Ours):
        stats = contender.writer.last_save
        if stats is not None and stats.read_seconds:
            sample.read_rates.append(stats.bytes_written / stats.read_seconds)
    shutil.rmtree(path)


def _synchronize(shape: Shape) -> None:
    if shape.device == "cuda":
        torch.cuda.synchronize()


def _reset_peak_memory() -> None:
    with contextlib.suppress(OSError):  # else it is the peak of the whole run
        Path("/proc/self/clear_refs").write_text("5")


def _peak_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def bare_copy_rate(nbytes: int = 1 << 30, repeats: int = 5) -> float:
    """Bytes per second of ``copy_`` from the device into pinned memory."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    rates = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(nbytes / (time.perf_counter() - began))
    return median(rates[1:])


def show(results: dict[int, dict[str, list[Sample]]], nbytes: int, rates: dict[str, float]) -> None:
    console = Console(width=140)
    console.print(
        f"state {nbytes / (1 << 30):.2f} GiB; "
        + ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in rates.items())
    )
    for every, by_name in results.items():
        table = Table(title=f"a save every {every} iteration(s); medians of stretches")
        for column in (
            "",
            "iteration",
            "of none",
            "async_save",
            "step",
            "commit",
            "D2H",
            "peak host",
        ):
            table.add_column(column, justify="left" if not column else "right")
        none = median(each.iteration for each in by_name[Contender.name])
        for name, samples in by_name.items():
            iteration = median(each.iteration for each in samples)
            table.add_row(
                name,
                f"{1e3 * iteration:.1f} ms",
                f"{iteration / none:.3f}",
                _milliseconds([x for each in samples for x in each.calls]),
                _milliseconds([x for each in samples for x in each.waits]),
                _milliseconds([x for each in samples for x in each.commits]),
                _rate([x for each in samples for x in each.read_rates]),
                f"{max(each.peak_memory for each in samples) / (1 << 30):.1f} GiB",
            )
        console.print(table)
    losses = [each.losses for by in results.values() for s in by.values() for each in s]
    shortest = min(map(len, losses))
    apart = max(abs(one[i] - losses[0][i]) for one in losses for i in range(shortest))
    console.print(f"losses of all runs, largest difference from the first: {apart:.3g}")


def _milliseconds(values: list[float]) -> str:
    return f"{1e3 * median(values):.2f} ms" if values else ""


def _rate(values: list[float]) -> str:
    return f"{median(values) / 1e9:.2f} GB/s" if values else ""


def draw(results: dict[int, dict[str, list[Sample]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(6 * len(results), 4), squeeze=False)
    for axis, (every, by_name) in zip(axes[0], results.items(), strict=True):
        names = list(by_name)
        heights = [1e3 * median(each.iteration for each in by_name[name]) for name in names]
        axis.barh(names, heights)
        axis.set_xlabel("ms per iteration")
        axis.set_title(f"a save every {every} iteration(s)")
        axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--dir", type=Path, help="where the checkpoints go")
    arguments.add_argument("--iterations", type=int, default=20, help="of a stretch")
    arguments.add_argument("--every", type=int, nargs="+", default=[1, 10])
    arguments.add_argument("--repeats", type=int, default=3, help="stretches of each")
    arguments.add_argument("--cache-gib", type=float, default=16)
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--png", type=Path)
    arguments.add_argument("--smoke", action="store_true")
    options = arguments.parse_args()
    shape = SMOKE if options.smoke else Shape()
    if shape.device == "cuda" and not torch.cuda.is_available():
        arguments.error("there is no GPU; --smoke runs a tiny model on the host")
    torch.use_deterministic_algorithms(True, warn_only=True)
    on_gpu = shape.device == "cuda"
    directory = Path(tempfile.mkdtemp(prefix="gpu-training-", dir=options.dir))
    job = Job(shape)
    job.forward_backward()
    job.step()
    nbytes = sum(t.nbytes for t in job.model.state_dict().values())
    nbytes += sum(t.nbytes for s in job.optimizer.state.values() for t in s.values())
    del job
    makers: dict[str, Callable[[], Contender]] = {
        Contender.name: Contender,
        Stock.name: Stock,
        StockPinned.name: lambda: StockPinned(on_gpu),
        Ours.name: lambda: Ours(int(options.cache_gib * (1 << 30))),
    }
    results: dict[int, dict[str, list[Sample]]] = {every: {} for every in options.every}
    try:
        rates = {"raw disk": raw_write_rate(directory, min(nbytes, 4 << 30) + (8 << 20))}
        if on_gpu:
            rates["bare pinned copy"] = bare_copy_rate()
        for _ in range(options.repeats):
            for every in options.every:
                for name, make in makers.items():
                    contender = make()
                    found = stretch(contender, shape, options.iterations, every, directory)
                    contender.close()
                    del contender
                    gc.collect()
                    results[every].setdefault(name, []).append(found)
        show(results, nbytes, rates)
        if options.json is not None:
            document = {
                **describe(directory),
                "benchmark": "gpu_training",
                "device": torch.cuda.get_device_name() if on_gpu else "cpu",
                "cuda": torch.version.cuda,
                "shape": asdict(shape),
                "state_bytes": nbytes,
                "rates": rates,
                "samples": {
                    every: {name: [asdict(each) for each in found] for name, found in by.items()}
                    for every, by in results.items()
                },
            }
            options.json.write_text(json.dumps(document, indent=1) + "\n")
        if options.png is not None:
            draw(results, options.png)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
