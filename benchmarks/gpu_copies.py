"""When the engine is ready to use the link from the GPU."""

from __future__ import annotations

import time

import torch

from dcp_datastates._native import Engine

__all__ = ["prepare"]

_PATIENCE_SECONDS = 120.0


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
