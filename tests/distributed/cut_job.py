"""A job on two nodes that saves again and again, under torchrun: ``cut_job.py ROOT SAVES``.

Each rank notes in ``ROOT/rank-<n>.jsonl`` what its calls of ``async_save`` took, and what became of the saves.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dcp_datastates

COMMIT_TIMEOUT = 5


def main(root: Path, saves: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    notes = (root / f"rank-{rank}.jsonl").open("a", buffering=1)
    lock = threading.Lock()

    def note(**what: Any) -> None:
        with lock:
            notes.write(json.dumps({"at": time.monotonic(), **what}) + "\n")

    weight = torch.nn.Parameter(torch.full((200_000,), float(rank)))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    dcp_datastates.track(optimizer)
    for number in range(saves):
        began = time.monotonic()
        handle = dcp_datastates.async_save(
            {f"w{rank}": weight, "number": number},
            root / f"step-{number}",
            host_cache_size="64MiB",
            reads="immediate",
            commit_timeout=COMMIT_TIMEOUT,
        )
        called = time.monotonic()
        optimizer.step()
        stepped = time.monotonic()
        note(event="called", number=number, took=called - began, step=stepped - called)
        error = handle.committed.exception(120)
        note(
            event="told",
            number=number,
            outcome="committed" if error is None else type(error).__name__,
            why=str(error),
        )
        if error is not None:  # no storm of saves while the network is down
            time.sleep(1)
        time.sleep(0.2)
    note(event="end")
    os._exit(0)  # torchrun's agents may not hear of each other any more


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
