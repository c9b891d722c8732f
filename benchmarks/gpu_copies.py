"""What the link from the GPU gives to a plain copy, and when the engine is ready to use it."""

from __future__ import annotations

import time

import torch

from dcp_datastates._native import Engine

__all__ = ["BareCopy", "prepare"]

_PATIENCE_SECONDS = 120.0


class BareCopy:
    """One ``copy_`` of ``nbytes`` from the device into pinned memory."""

    def __init__(self, nbytes: int, device: str) -> None:
        self.on_gpu = device == "cuda"
        self.source = torch.ones(nbytes, dtype=torch.uint8, device=device)
        self.target = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self.on_gpu)
        self.seconds()  # warms up

    def seconds(self) -> float:
        """That the copy takes; on a GPU, by its own clock."""
        if not self.on_gpu:
            began = time.perf_counter()
            self.target.copy_(self.source)
            return time.perf_counter() - began
        torch.cuda.synchronize()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        self.target.copy_(self.source, non_blocking=True)
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3


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
