"""What planning a save costs as jobs grow: stock PyTorch's planner and this package's, side by side in one run.

    python benchmarks/planning.py
    python benchmarks/planning.py --ranks 64 1024 --stock-up-to 4096

No processes are started: the plans of all ranks are made up. See benchmarks/README.md for what the figures mean.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from machine import describe
from planners import Cost, columns, stock
from planning_jobs import Job

_HERE = Path(__file__).resolve().parent
_PLANNERS = {
    "DefaultSavePlanner": lambda job: stock(job, caching=False),
    "DefaultSavePlanner, plan caching": lambda job: stock(job, caching=True),
    "plans in columns": columns,
}
_OURS = "plans in columns"
_REPEAT_UP_TO = 5.0  # seconds: what takes longer is measured once


@dataclass(frozen=True)
class Row:
    """One planner, one job, the first save or a later one."""

    planner: str
    job: Job
    save: str
    cost: Cost

    def as_json(self) -> dict[str, Any]:
        cost = self.cost
        return {
            "planner": self.planner,
            "ranks": self.job.ranks,
            "tensors": self.job.tensors,
            "save": self.save,
            "coordinator_seconds": cost.coordinator,
            "coordinator_steps": cost.steps,
            "rank_seconds": cost.rank,
            "bytes_gathered_per_rank": cost.gathered,
            "bytes_scattered_per_rank": cost.scattered,
            "bytes_broadcast": cost.broadcast,
        }


def run(jobs: list[Job], stock_up_to: int, repeats: int, log: Console) -> list[Row]:
    """Measure all jobs, small ones first; of several repeats the fastest counts, for each save."""
    rows = []
    for job in sorted(jobs, key=lambda job: job.chunks):
        for planner, plan_saves in _PLANNERS.items():
            if planner != _OURS and job.ranks > stock_up_to:
                continue
            log.print(f"{job.ranks} ranks x {job.tensors} tensors: {planner}")
            found: list[list[Cost]] = []
            begun = time.perf_counter()
            while len(found) < repeats and (
                not found or time.perf_counter() - begun < _REPEAT_UP_TO
            ):
                found.append(plan_saves(job))
                gc.collect()
            for save, costs in zip(("first", "steady"), zip(*found, strict=True), strict=True):
                best = min(costs, key=lambda cost: cost.coordinator)
                best.rank = min(cost.rank for cost in costs)
                rows.append(Row(planner, job, save, best))
    return rows


def show(rows: list[Row], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("ranks", "tensors"):
        table.add_column(column, justify="right")
    table.add_column("planner")
    table.add_column("save")
    columns_ = ["coordinator ms", "each rank ms", "gathered", "scattered", "broadcast"]
    for column in columns_:
        table.add_column(column, justify="right")
    for row in rows:
        cost = row.cost
        sizes = (cost.gathered, cost.scattered, cost.broadcast)
        table.add_row(
            f"{row.job.ranks:,}",
            str(row.job.tensors),
            row.planner,
            row.save,
            f"{cost.coordinator * 1e3:,.1f}",
            f"{cost.rank * 1e3:,.1f}",
            *(f"{size:,}" for size in sizes),
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384])
    parser.add_argument("--tensors", type=int, nargs="+", default=[300, 900])
    parser.add_argument(
        "--stock-up-to", type=int, default=1024, help="ranks; stock takes minutes beyond"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of what takes less than 5 s")
    parser.add_argument(
        "--json",
        type=Path,
        default=_HERE / "results" / f"planning-{date.today().isoformat()}.json",
        help="where the results go",
    )
    arguments = parser.parse_args()

    console = Console(width=160 if not sys.stdout.isatty() else None)
    jobs = [Job(ranks, tensors) for ranks in arguments.ranks for tensors in arguments.tensors]
    rows = run(jobs, arguments.stock_up_to, arguments.repeats, Console(stderr=True))
    show(rows, console)
    record = {
        **describe(_HERE),
        "benchmark": "planning",
        "repeats": arguments.repeats,
        "rows": [row.as_json() for row in rows],
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"\nwritten to {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
