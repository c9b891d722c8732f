"""What it costs a job to be proven: steps with a journal, and saves that compare replicas, beside the same job without.

Run: ``python benchmarks/proven.py [--json FILE]``. Two ranks train replicas of a model on the host, and save every
fifth step. Each round runs all variants, one after another; the table has the medians of all rounds, and their ratio to
the plain job's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dcp_datastates import CheckpointManager, RngState
from machine import describe

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "journal": {"journal": True},
    "compare_replicas=10": {"compare_replicas": 10},
    "both": {"journal": True, "compare_replicas": 10},
    "compare_replicas=1": {"compare_replicas": 1},
}
WIDTH, LAYERS = 1536, 12
EVERY, STEPS, ROUNDS = 5, 10, 7


def _rank(rank: int, root: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    state = {"model": model, "optimizer": optimizer, "rng": RngState()}
    batch = torch.randn(64, WIDTH)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    for round_ in range(ROUNDS + 1):  # the first is a rehearsal
        for name, options in VARIANTS.items():
            folder = Path(root) / name
            with CheckpointManager(
                folder, every=EVERY, keep=1, save_last=False, **options
            ) as manager:
                dist.barrier()
                began, cpu = time.perf_counter(), time.process_time()
                for step in range(1, STEPS + 1):
                    loss = model(batch).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    manager.save(step, state, {"loss": loss.detach()})
                took = (time.perf_counter() - began) / STEPS
                manager.wait()
                busy = (time.process_time() - cpu) / STEPS
            dist.barrier()
            if rank == 0:
                shutil.rmtree(folder)
            dist.barrier()
            if round_:
                found[name].append((took, busy))
    if rank == 0:
        nbytes = sum(each.nbytes for each in model.parameters()) * 3
        Path(root, "found").write_text(json.dumps([nbytes, found]))
    dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--root", help="a directory for the checkpoints")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.root) as root:
        mp.start_processes(_rank, (root,), nprocs=2, start_method="spawn")
        nbytes, found = json.loads(Path(root, "found").read_text())
    steps = {name: statistics.median(took for took, _ in each) for name, each in found.items()}
    busy = {name: statistics.median(cpu for _, cpu in each) for name, each in found.items()}
    print(f"{nbytes / 1e6:.0f} MB of replicas on each of 2 ranks; a save every {EVERY} steps")
    for name in VARIANTS:
        print(
            f"{name:20}  {steps[name] * 1e3:6.1f} ms a step ({steps[name] / steps['plain']:.3f} x), "
            f"{busy[name] * 1e3:6.1f} ms of CPU ({busy[name] / busy['plain']:.3f} x)"
        )
    if arguments.json:
        figures = {"machine": describe(Path(".")), "bytes": nbytes, "step": steps, "cpu": busy}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
