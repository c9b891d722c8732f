"""What a stream that trains pays to launch a kernel, on the host, while other things go on.

The loop is in the main thread, as training is; what goes on beside it is in threads of the package or of its own.
Launches block where the driver holds a lock (pinning), or where its queue is full.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from dcp_datastates.io.engine import engine
from dcp_datastates.results import SaveHandle
from gpu_first.step import Options, Part, Saves, main, spread, synchronize

_SHORT_QUEUE = 500
_DEEP = 5000
_SLEEP_CYCLES = 400_000_000
_BLOCKED_SECONDS = 1e-3


class Loop:
    """Small operations, one after another, each timed."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._tensor = torch.zeros(1 << 16, device=device)
        self._timed(self.launch, 2 * _SHORT_QUEUE)

    def launch(self) -> None:
        self._tensor.add_(1)

    def item(self) -> None:
        """As ``loss.item()``: waits for its four bytes."""
        self._tensor[0].item()

    def until(self, over: Callable[[], bool], what: Callable[[], None]) -> dict[str, Any]:
        """With a queue that stays short, which is waited for outside of what is timed."""
        found: list[float] = []
        began = time.perf_counter()
        while not (over() and len(found) >= _SHORT_QUEUE):
            found += self._timed(what, 50)
            if len(found) % _SHORT_QUEUE == 0 and self._device == "cuda":
                torch.cuda.current_stream().synchronize()  # and not the copies beside it
        return {**spread(found), "all ms": 1e3 * (time.perf_counter() - began)}

    def beside(self, work: Callable[[], object]) -> dict[str, Any]:
        """Launches while ``work`` runs in a thread."""
        with ThreadPoolExecutor() as threads:
            future = threads.submit(work)
            found = self.until(future.done, self.launch)
            future.result()
        return found

    def full_queue(self) -> dict[str, Any]:
        """Launches behind a kernel that takes long: where they begin to block is the queue's length."""
        synchronize(self._device)
        if self._device == "cuda":
            torch.cuda._sleep(_SLEEP_CYCLES)
        found = self._timed(self.launch, _DEEP)
        synchronize(self._device)
        blocked = [at for at, seconds in enumerate(found) if seconds > _BLOCKED_SECONDS]
        return {**spread(found), "first blocked": blocked[0] if blocked else None}

    def _timed(self, what: Callable[[], None], count: int) -> list[float]:
        clock, found = time.perf_counter, []
        for _ in range(count):
            began = clock()
            what()
            found.append(clock() - began)
        return found


def parts(options: Options) -> Iterator[Part]:
    gc.disable()  # what is measured is the driver
    loop = Loop(options.device)
    half = torch.ones((2 << 30) // (64 if options.tiny else 1), dtype=torch.uint8)
    yield "alone", lambda: loop.until(lambda: True, loop.launch)
    if options.device == "cuda":
        yield "torch pins", lambda: loop.beside(half.pin_memory)
    saves = Saves(options, count=8, nbytes=512 << 20)
    if options.device == "cuda":
        native = engine(saves.cache)
        native.open_device(0)
        yield "the engine pins", lambda: loop.until(lambda: native.devices_prepared, loop.launch)
        yield "pin fault", lambda: native.pin_fault and native.pin_fault.message

    def bare_copy() -> dict[str, Any]:
        source = half.to(options.device)
        if options.device == "cpu":
            return loop.beside(lambda: half.copy_(source))
        target = half.pin_memory()
        synchronize(options.device)
        with torch.cuda.stream(torch.cuda.Stream()):
            target.copy_(source, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return loop.until(copied.query, loop.launch)

    def saving(watch: Callable[[SaveHandle], dict[str, Any]]) -> dict[str, Any]:
        handle = saves.save()
        found = watch(handle)
        handle.result()
        return found

    def written(save: SaveHandle) -> dict[str, Any]:
        save.captured.result()
        return loop.until(save.committed.done, loop.launch)

    yield "a bare copy", bare_copy
    saves.save().result()  # plans
    yield "a save is read", lambda: saving(lambda s: loop.until(s.captured.done, loop.launch))
    yield "a save is written", lambda: saving(written)
    yield "loss.item() alone", lambda: loop.until(lambda: True, loop.item)
    yield "loss.item(), save", lambda: saving(lambda s: loop.until(s.captured.done, loop.item))
    yield "full queue", loop.full_queue
    yield "full queue, save", lambda: saving(lambda _: loop.full_queue())


if __name__ == "__main__":
    main(parts)
