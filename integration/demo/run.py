"""The demo: train and save every iteration beside stock's writers, get killed, resume on fewer ranks.

    python integration/demo/run.py

Ends with status 0 if the resumed job's losses are those of an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path

import torch.multiprocessing as mp
from rich.console import Console

import dcp_datastates as ds
from report import WRITERS, Run, report_losses, report_stalls, say_what_comes_next, show
from train import ITERATIONS, size_of, work

FIRST_RANKS, RESUMED_RANKS = 4, 2


def listen(ranks: int, root: Path, phases: list[str], kill: Callable[[Run], bool]) -> Iterator[Run]:
    """What rank 0 tells until the job ends, or until ``kill`` is true: then all ranks get SIGKILL."""
    heard, told = Pipe(duplex=False)
    job = mp.start_processes(
        work, (ranks, root, phases, told), nprocs=ranks, join=False, start_method="forkserver"
    )
    told.close()
    run, ended = None, False
    try:
        while not ended:
            ended = job.join(timeout=0.001)
            with contextlib.suppress(EOFError):  # rank 0 has ended
                while heard.poll():
                    run = heard.recv()
                    yield run
            if run is not None and kill(run):
                run.killed = True
                yield run
                return
    finally:
        for process in job.processes:
            process.kill()
            process.join()


def demonstrate(root: Path, console: Console) -> None:
    """The whole demo; ends with an error where it shows anything but what it should."""
    began = time.perf_counter()
    checkpoints = root / "datastates"
    chosen = random.randint(ITERATIONS // 2, ITERATIONS - 4)

    def in_flight(run: Run) -> bool:
        """Whether a save from the chosen one on has begun files, and is not committed."""
        if run.phase != "datastates" or len(run.losses) < chosen:
            return False
        path = checkpoints / f"step-{len(run.losses)}"
        return any(names for *_, names in os.walk(path)) and not (path / ".metadata").exists()

    console.print(
        f"{FIRST_RANKS} processes train a transformer, and save it in every iteration: with stock "
        "DCP, with its best mode, and with this package."
    )
    runs = show(listen(FIRST_RANKS, root, list(WRITERS), in_flight), console)
    stock, _, killed = runs
    newest = ds.latest(checkpoints)
    if not killed.killed or newest is None:
        sys.exit("the demo failed: no save was caught in flight, or none was committed before")
    torn = checkpoints / f"step-{len(killed.losses)}"
    console.print(
        f"The save of step {len(killed.losses)} was in flight: {size_of(torn) / 1e6:.0f} MB of it "
        f"lie in {torn.name}, {'committed after all' if newest == torn else 'not committed'}. "
        f"The newest committed checkpoint is {newest.name}."
    )
    (resumed,) = show(listen(RESUMED_RANKS, root, ["resumed"], lambda run: False), console)
    report_losses(stock, killed, resumed, console)
    report_stalls(runs, console)
    say_what_comes_next(runs, resumed, time.perf_counter() - began, console)


if __name__ == "__main__":
    # All ranks are forked from one process that has imported torch, and what the first optimizer imports.
    multiprocessing.set_forkserver_preload(["torch._dynamo", "train"])
    with tempfile.TemporaryDirectory(prefix="dcp-datastates-demo-") as folder:
        demonstrate(Path(folder), Console())
