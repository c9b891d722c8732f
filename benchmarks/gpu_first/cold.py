"""Step 5: the first save of a process, whose host cache is not pinned yet: what it takes, and what training pays."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from statistics import median
from typing import Any

from dcp_datastates.io.engine import engine
from gpu_contenders import Contender, Ours, StockPinned
from gpu_first.clock import Clock
from gpu_first.iterations import Iterations, milliseconds
from gpu_first.shapes import shape_of
from gpu_first.step import Findings, Options, main
from gpu_job import Job

_STOCK = "stock"
_SHARES = {"small": 0.5, "large": 1.5}
"""The cache's part of the state."""
_LEAST_CACHE = 32 << 20
_LEAST_ITERATIONS = 5
_MOST_SECONDS = 15.0


def measure(options: Options, findings: Findings) -> None:
    job = Job(shape_of(options))
    warm = Iterations(job)
    for _ in range(2 + _LEAST_ITERATIONS):
        warm.iterate()
    plain = median(warm.seconds()[2:])
    findings.note("state_bytes", job.nbytes)
    findings.note("plain_iteration_seconds", plain)
    cache = None if options.cache == _STOCK else int(_SHARES[options.cache] * job.nbytes)
    began = time.perf_counter()
    contender: Contender
    if cache is None:
        contender = StockPinned(on_gpu=options.device == "cuda")
    else:
        cache = max(cache, _LEAST_CACHE)
        contender = Ours(cache)
    findings.note("cache_bytes", cache)
    findings.note("writer_seconds", time.perf_counter() - began)
    for name in ("first", "second"):
        findings.note(name, one_save(contender, job, options, plain))
    if cache is not None:
        native = engine()
        findings.note("pinned_bytes", native.pinned_bytes)
        findings.note("pin_fault", None if native.pin_fault is None else native.pin_fault.message)
    contender.close()


def one_save(contender: Contender, job: Job, options: Options, plain: float) -> dict[str, Any]:
    """While it is under way the job iterates; ``stall_seconds`` is what that takes longer than without it."""
    iterations = Iterations(job)
    state = job.state()
    clock = Clock()
    committed = contender.save(state, options.dir / "saved")
    call = clock.elapsed()
    del state
    assert committed is not None
    ends = {"committed": clock.end_of(committed), "captured": clock.end_of(captured_of(contender))}
    prepared = engine_prepared(contender)
    pinned: float | None = None
    waits = [iterations.iterate(contender.before_step)]
    while len(waits) < _LEAST_ITERATIONS or not committed.done():
        if clock.elapsed() > _MOST_SECONDS:
            break
        waits.append(iterations.iterate())
        if pinned is None and prepared():
            pinned = clock.elapsed()
    seconds = iterations.seconds()
    committed.result()
    return {
        "call_seconds": call,
        **{f"{stage}_seconds": clock.seconds(end) for stage, end in ends.items()},
        "pinned_seconds": pinned,
        "stall_seconds": sum(seconds) - plain * len(seconds),
        "longest_iteration_seconds": max(seconds),
        "first_step_seconds": waits[0],
        "iterations_ms": milliseconds(seconds[:50]),
    }


def captured_of(contender: Contender) -> Future[Any]:
    if isinstance(contender, Ours):
        return contender.writer.captured
    assert isinstance(contender, StockPinned)
    staging: Future[Any] = contender.staging
    return staging


def engine_prepared(contender: Contender) -> Callable[[], bool]:
    """Whether the cache is pinned, as far as it will be."""
    if not isinstance(contender, Ours):
        return lambda: False
    native = engine()
    return lambda: native.pinned_bytes > 0 and native.devices_prepared


def add_options(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument(
        "--cache", choices=(*_SHARES, _STOCK), default="large", help="beside the state"
    )


if __name__ == "__main__":
    sys.exit(main(measure, add_options))
