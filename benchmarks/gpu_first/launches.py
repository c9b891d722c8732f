"""Step 4: what a stream that trains pays to launch a kernel, on the host, while other things go on.

The loop is in the main thread, as training is; what goes on beside it is in threads of the package or of its own.
Launches block where the driver holds a lock (pinning), or where its queue is full. Microseconds.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dcp_datastates
from dcp_datastates import DataStatesWriter
from dcp_datastates.io.engine import engine
from gpu_first.step import Findings, NeedsGpuError, Options, main, spread, synchronize

_GIB = 1 << 30
_SHORT_QUEUE = 500
_DEEP = 5000
_PATIENCE_SECONDS = 20.0
_SLEEP_CYCLES = 400_000_000
_BLOCKED_SECONDS = 1e-3


class Loop:
    """Small kernels, one after another, each launch timed."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._tensor = torch.zeros(1 << 16, device=device)
        self.launch(2 * _SHORT_QUEUE)

    def launch(self, count: int) -> list[float]:
        tensor, clock, found = self._tensor, time.perf_counter, []
        for _ in range(count):
            began = clock()
            tensor.add_(1)
            found.append(clock() - began)
        return found

    def until(self, over: Callable[[], bool], least: int = 0) -> list[float]:
        """With a queue that stays short, which is waited for outside of what is timed."""
        found: list[float] = []
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (not over() or len(found) < least) and time.monotonic() < deadline:
            found += self.launch(50)
            if len(found) % _SHORT_QUEUE == 0 and self.device == "cuda":
                torch.cuda.current_stream().synchronize()  # and not the copies beside it
        synchronize(self.device)
        return found

    def small_copies(self, over: Callable[[], bool], least: int = 0) -> list[float]:
        """As ``loss.item()``: each waits for its four bytes."""
        found: list[float] = []
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (not over() or len(found) < least) and time.monotonic() < deadline:
            began = time.perf_counter()
            self._tensor[:1].cpu().item()
            found.append(time.perf_counter() - began)
        return found

    def behind_a_long_kernel(self, count: int) -> dict[str, Any]:
        """``count`` launches behind a kernel that takes long: where they begin to block is the queue's length."""
        synchronize(self.device)
        if self.device == "cuda":
            torch.cuda._sleep(_SLEEP_CYCLES)
        found = self.launch(count)
        synchronize(self.device)
        blocked = [at for at, seconds in enumerate(found) if seconds > _BLOCKED_SECONDS]
        return {**spread(found), "first_blocked": blocked[0] if blocked else None}


class Beside:
    """``work``, in a thread, while the loop runs."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.seconds = 0.0
        self.error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            self._work()
        except BaseException as error:
            self.error = error
        self.seconds = time.perf_counter() - began

    def watch(self, loop: Loop) -> dict[str, Any]:
        """The launches while it runs."""
        self._thread.start()
        found = loop.until(lambda: not self._thread.is_alive())
        self._thread.join()
        if self.error is not None:
            raise self.error
        return {**spread(found), "seconds": self.seconds}


class Saves:
    """Of one large state, all of it read later."""

    def __init__(self, options: Options, nbytes: int, cache: int) -> None:
        self._dir: Path = options.dir
        piece = nbytes // 8
        self.state = {
            f"{index}": torch.ones(piece // 4, device=options.device) for index in range(8)
        }
        self._writer = DataStatesWriter(host_cache_size=cache, read_window="immediate", defer="all")
        self._count = 0

    def save(self) -> dcp_datastates.SaveHandle:
        self._count += 1
        return dcp_datastates.async_save(
            self.state, self._dir / f"{self._count % 2}", writer=self._writer
        )

    def close(self) -> None:
        self._writer.close()


def measure(options: Options, findings: Findings) -> None:
    gc.disable()  # what is measured is the driver
    scale = 64 if options.tiny else 1
    cache, nbytes = 6 * _GIB // scale, 4 * _GIB // scale
    deep = _DEEP // 10 if options.tiny else _DEEP
    loop = Loop(options.device)
    findings.note("baseline", spread(loop.until(lambda: True, least=deep)))
    with findings.part("bare_pinning"):
        findings.note("bare_pinning", Beside(lambda: _pinned(options, cache // 2)).watch(loop))
    with findings.part("pinning"):
        findings.note("pinning", pinning(loop, cache))
    with findings.part("bare_copying"):
        findings.note("bare_copying", bare_copying(loop, options, nbytes))
    saves = Saves(options, nbytes, cache)
    saves.save().result()  # plans
    with findings.part("copying"):
        copying, writing = saving(loop, saves, 2)
        findings.note("copying", copying)
        findings.note("writing", writing)
    findings.note("small_copies", spread(loop.small_copies(lambda: True, least=deep // 10)))
    with findings.part("small_copies_saving"):
        handle = saves.save()
        found = loop.small_copies(handle.captured.done)
        findings.note("small_copies_saving", spread(found))
        handle.result()
    findings.note("deep", loop.behind_a_long_kernel(deep))
    with findings.part("deep_copying"):
        handle = saves.save()
        findings.note("deep_copying", loop.behind_a_long_kernel(deep))
        handle.result()
    saves.close()


def _pinned(options: Options, nbytes: int) -> torch.Tensor:
    """As stock stages."""
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=options.device == "cuda")


def pinning(loop: Loop, cache: int) -> dict[str, Any]:
    """While the engine pins its cache."""
    native = engine(cache)
    began = time.perf_counter()
    try:
        native.open_device(0)
    except RuntimeError as error:
        if loop.device == "cuda":
            raise
        raise NeedsGpuError(str(error)) from error
    opened = time.perf_counter() - began
    found = loop.until(lambda: native.devices_prepared)
    fault = native.pin_fault
    return {
        **spread(found),
        "seconds": time.perf_counter() - began,
        "open_seconds": opened,
        "pinned_bytes": native.pinned_bytes,
        "cache_bytes": native.host_cache_bytes,
        "fault": None if fault is None else fault.message,
    }


def bare_copying(loop: Loop, options: Options, nbytes: int) -> dict[str, Any]:
    """While one plain copy to pinned memory is under way, on a stream of its own."""
    source = torch.ones(nbytes // 2, dtype=torch.uint8, device=options.device)
    target = _pinned(options, nbytes // 2)
    synchronize(options.device)
    if options.device != "cuda":
        return Beside(lambda: target.copy_(source)).watch(loop)
    with torch.cuda.stream(torch.cuda.Stream()):
        target.copy_(source, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
    return spread(loop.until(copied.query))


def saving(loop: Loop, saves: Saves, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Until all is read, and from then on until it is committed."""
    copying: list[float] = []
    writing: list[float] = []
    calls = []
    for _ in range(count):
        began = time.perf_counter()
        handle = saves.save()
        calls.append(time.perf_counter() - began)
        copying += loop.until(handle.captured.done)
        writing += loop.until(handle.committed.done)
        handle.result()
    return {**spread(copying), "call_seconds": calls}, spread(writing)


if __name__ == "__main__":
    sys.exit(main(measure))
