"""Step 10: thousands of small tensors, with batches of copies and without: DCP_DATASTATES_CUDA_BATCH says which."""

from __future__ import annotations

import os
import sys
import time

import torch

import dcp_datastates
from dcp_datastates import DataStatesWriter
from gpu_first.step import Findings, Options, main, spread, synchronize

_ROUNDS = 5


def measure(options: Options, findings: Findings) -> None:
    findings.note("batches", os.environ.get("DCP_DATASTATES_CUDA_BATCH"))
    count = 200 if options.tiny else 20_000
    state = {f"{index}": torch.ones(16 << 10, device=options.device) for index in range(count)}
    writer = DataStatesWriter(host_cache_size="2GiB" if count > 10_000 else "64MiB", defer="all")
    seconds = []
    for index in range(_ROUNDS):
        synchronize(options.device)
        began = time.perf_counter()
        handle = dcp_datastates.async_save(state, options.dir / f"{index % 2}", writer=writer)
        handle.captured.result()
        seconds.append(time.perf_counter() - began)
        handle.result()
    findings.note("captured", spread(seconds[1:]))  # the first plans, and pins
    writer.close()


if __name__ == "__main__":
    sys.exit(main(measure))
