"""The process that dies in :mod:`gpu_first.dying`, as a training job would: by an exception that nobody catches."""

from __future__ import annotations

import argparse
import faulthandler
import time
from pathlib import Path

import torch

import dcp_datastates
from dcp_datastates import DataStatesWriter

__all__ = ["FAILED"]

FAILED = "FAILED AT"
_STACKS_SECONDS = 15.0
"""After which a process that does not end says where it is."""
_SLEEP_CYCLES = 600_000_000
_LAUNCHES = 4000


def die(options: argparse.Namespace) -> None:
    piece = (4 if options.tiny else 256) << 20
    state = {f"{index}": torch.ones(piece // 4, device=options.device) for index in range(8)}
    cache = "64MiB" if options.tiny else "2560MiB"
    writer = DataStatesWriter(host_cache_size=cache, read_window="immediate", defer="all")
    dcp_datastates.async_save(state, options.dir / f"{options.during}-1", writer=writer).result()
    index(options.device, 0)  # what is loaded lazily is loaded now
    if options.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda._sleep(_SLEEP_CYCLES)
    if options.during == "save":  # reads behind the long kernel, beside the assert
        dcp_datastates.async_save(state, options.dir / f"{options.during}-2", writer=writer)
    faulthandler.dump_traceback_later(_STACKS_SECONDS)
    try:
        index(options.device, 1 << 20)
        raise RuntimeError("no assert has come of it")
    except (RuntimeError, IndexError):
        print(FAILED, time.monotonic(), flush=True)
        raise


def index(device: str, at: int) -> None:
    """Read the element ``at`` of sixteen, with a launch queue that is full behind it.

    Raises what torch makes of an index out of range: on the host at once, on a GPU when its assert has come.
    """
    small = torch.zeros(16, device=device)
    small[torch.full((1,), at, device=device)]
    for _ in range(_LAUNCHES):
        small.add_(1)
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("device", choices=("cuda", "cpu"))
    arguments.add_argument("during", choices=("nothing", "save"))
    arguments.add_argument("dir", type=Path)
    arguments.add_argument("--tiny", action="store_true")
    die(arguments.parse_args())


if __name__ == "__main__":
    main()
