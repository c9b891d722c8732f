"""What a save takes from training: the first two of a process, with nothing pinned before, then two with all pinned."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_datastates import DataStatesReader
from dcp_datastates._native import Engine
from dcp_datastates.io.engine import engine
from gpu_first.contenders import Contender, Ours, StockPinned
from gpu_first.job import SMOKE, Job, Shape
from gpu_first.step import Options, Part, Saves, main, spread

_ITERATIONS = 10
_LARGE = Shape(layers=4)  # 4 GB of parameters and AdamW
_LEAST_CACHE = 64 << 20
_PATIENCE_SECONDS = 120.0


def parts(options: Options) -> Iterator[Part]:
    if options.variant == "many":
        yield "many", partial(captured, Saves(options, count=20_000, nbytes=64 << 10))
        return
    job = Job(SMOKE if options.tiny else _LARGE)
    for _ in range(3):
        job.forward_backward()
        job.step()
    contender = contender_of(options, job.nbytes)
    path = options.dir / "saved"
    for name in ("first", "second", "pinned", "again"):
        if name == "pinned" and isinstance(contender, Ours):
            prepare(engine(), options.device)
        yield name, partial(window, contender, job, path)
    if options.variant != "none":
        yield "load GB/s", partial(load_rate, contender, job, path)
    contender.close()


def contender_of(options: Options, nbytes: int) -> Contender:
    if options.variant == "none":
        return Contender()
    if options.variant == "stock":
        return StockPinned(on_gpu=options.device == "cuda")
    cache = max(int((0.5 if options.variant == "small" else 1.5) * nbytes), _LEAST_CACHE)
    window = "immediate" if options.variant == "immediate" else "backward"
    return Ours("auto" if options.variant == "default" else cache, window)


def window(contender: Contender, job: Job, path: Path) -> dict[str, float]:
    """Milliseconds of ten iterations with a save in the first. The commit comes after them, and does not count."""
    found = {}
    state = job.state()
    job.synchronize()
    began = time.perf_counter()

    def note(name: str, _: Any = None) -> None:
        found[f"{name} ms"] = 1e3 * (time.perf_counter() - began)

    committed = contender.save(state, path)
    note("call")
    del state
    if committed is not None:
        contender.captured().add_done_callback(partial(note, "captured"))
        committed.add_done_callback(partial(note, "committed"))
    for number in range(_ITERATIONS):
        job.forward_backward()
        contender.before_step()
        job.step()
        if number == 0:
            note("first step")
    job.synchronize()
    note("ten iterations")
    if committed is not None:
        committed.result()
    return found


def load_rate(contender: Contender, job: Job, path: Path) -> float:
    """Into the tensors on the device."""
    reader = DataStatesReader(path) if isinstance(contender, Ours) else dcp.FileSystemReader(path)
    state = job.state()
    job.synchronize()
    began = time.perf_counter()
    dcp.load(state, storage_reader=reader)
    job.synchronize()
    return job.nbytes / (time.perf_counter() - began) / 1e9


def captured(saves: Saves) -> dict[str, float]:
    """From the call until all is read."""
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        handle = saves.save()
        handle.captured.result()
        seconds.append(time.perf_counter() - began)
        handle.result()
    return spread(seconds[1:])  # the first plans, and pins


def prepare(native: Engine, device: str) -> None:
    """Return when the host cache is pinned, as far as it can be.

    Raises :class:`TimeoutError`.
    """
    if device != "cuda":
        return
    native.open_device(torch.cuda.current_device())
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not native.devices_prepared:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the engine is not ready after {_PATIENCE_SECONDS:g} s")
        time.sleep(0.01)
    if native.pin_fault is not None:
        print(f"WARNING: {native.pin_fault.message}", flush=True)


if __name__ == "__main__":
    main(parts)
