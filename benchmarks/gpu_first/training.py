"""Step 6: what a save takes from training once all is pinned: iterations by the GPU's clock, without the commit."""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_datastates import DataStatesReader
from dcp_datastates.io.engine import engine
from gpu_contenders import Contender, Ours, StockPinned
from gpu_copies import prepare
from gpu_first.clock import Clock
from gpu_first.iterations import Iterations, milliseconds
from gpu_first.shapes import shape_of
from gpu_first.step import Findings, Options, free_bytes, main
from gpu_job import Job

_WINDOWS = 2
_ITERATIONS = 10
_CACHE_SHARE = 1.1
_LEAST_CACHE = 64 << 20


@dataclass
class Outcome:
    """Of one contender: a save in the first of every ten iterations, and its commit awaited behind the last."""

    iterations_ms: list[list[float]] = field(default_factory=list)
    call_seconds: list[float] = field(default_factory=list)
    first_step_seconds: list[float] = field(default_factory=list)
    commit_seconds: list[float] = field(default_factory=list)
    """From the call: at least as long as the ten iterations."""
    captured_seconds: float | None = None
    """On an idle GPU, all of it read at once: ours only."""
    load_seconds: float | None = None
    """Into the tensors on the device."""

    @property
    def window_seconds(self) -> float:
        return median(sum(each) for each in self.iterations_ms) / 1e3


def measure(options: Options, findings: Findings) -> None:
    job = Job(shape_of(options))
    for _ in range(3):
        job.forward_backward()
        job.step()
    findings.note("state_bytes", job.nbytes)
    findings.note("free_bytes", free_bytes(options.dir))
    on_gpu = options.device == "cuda"
    cache = max(int(_CACHE_SHARE * job.nbytes), _LEAST_CACHE)
    contenders: list[tuple[str, Callable[[], Contender]]] = [
        ("none", Contender),
        ("ours_default", lambda: Ours("auto")),  # first: caches never shrink
        ("ours", lambda: Ours(cache)),
        ("ours_immediate", lambda: Ours(cache, "immediate")),
        ("ours_disk", lambda: Ours(cache)),
        ("stock_pinned", lambda: StockPinned(on_gpu)),
        ("none_again", Contender),  # how far the machine has drifted meanwhile
    ]
    for name, make in contenders:
        with findings.part(name), _place(options, on_disk=name == "ours_disk") as path:
            findings.note(name, of_contender(make(), job, options, path))
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    with findings.part("trace"):
        findings.note("trace", trace(job, cache, options))


def _place(options: Options, on_disk: bool) -> tempfile.TemporaryDirectory[str]:
    """For checkpoints: the step's folder, or one beside the sources, on a real disk."""
    disk = Path(__file__).parents[2] / "build"
    disk.mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(dir=disk if on_disk else options.dir)


def trace(job: Job, cache: int, options: Options) -> str:
    """A save and two iterations in torch's profiler, for chrome://tracing: a file beside this step's findings."""
    contender = Ours(cache)
    with _place(options, on_disk=False) as path, torch.profiler.profile() as profile:
        committed = contender.save(job.state(), Path(path) / "saved")
        for _ in range(2):
            job.forward_backward()
            job.step()
        assert committed is not None
        committed.result()
    contender.close()
    into = (options.into or options.dir / "found.json").with_suffix(".trace.json.gz")
    profile.export_chrome_trace(str(into))
    return into.name


def of_contender(contender: Contender, job: Job, options: Options, place: str) -> dict[str, Any]:
    path = Path(place) / "saved"
    outcome = Outcome()
    if isinstance(contender, Ours):
        prepare(engine(), options.device)
    warm_up = contender.save(job.state(), path)
    contender.before_step()
    if warm_up is not None:
        warm_up.result()
    for _ in range(_WINDOWS):
        window(contender, job, path, outcome)
    if isinstance(contender, Ours):
        outcome.captured_seconds = captured_while_idle(contender, job, path)
    if warm_up is not None:
        outcome.load_seconds = loaded(contender, job, path)
    contender.close()
    return {**vars(outcome), "window_seconds": outcome.window_seconds}


def window(contender: Contender, job: Job, path: Path, outcome: Outcome) -> None:
    """A save, and the iterations until the next."""
    state = job.state()
    iterations = Iterations(job)
    clock = Clock()
    committed = contender.save(state, path)
    outcome.call_seconds.append(clock.elapsed())
    del state
    end = None if committed is None else clock.end_of(committed)
    outcome.first_step_seconds.append(iterations.iterate(contender.before_step))
    for _ in range(_ITERATIONS - 1):
        iterations.iterate()
    outcome.iterations_ms.append(milliseconds(iterations.seconds()))
    if committed is not None and end is not None:
        committed.result()
        outcome.commit_seconds.append(clock.seconds(end))


def captured_while_idle(contender: Ours, job: Job, path: Path) -> float:
    state = job.state()
    job.synchronize()
    began = time.perf_counter()
    committed = contender.save(state, path)
    contender.writer.captured.result()  # opens the read window
    seconds = time.perf_counter() - began
    assert committed is not None
    committed.result()
    return seconds


def loaded(contender: Contender, job: Job, path: Path) -> float:
    reader = DataStatesReader(path) if isinstance(contender, Ours) else dcp.FileSystemReader(path)
    state = job.state()
    job.synchronize()
    began = time.perf_counter()
    dcp.load(state, storage_reader=reader)
    job.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main(measure))
