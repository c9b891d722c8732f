"""What a save takes from training: stock PyTorch and this writer, side by side in one run.

    python benchmarks/stall.py --gib 2 --repeats 5

See benchmarks/README.md for what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from disk import raw_write_rate
from machine import describe
from measure import SITUATIONS, Sample, Situation
from stage_cost import StageCost
from workers import DataStatesContender, Worker, stage_costs, stock_contenders, usable_cpus

_HERE = Path(__file__).resolve().parent
_SMALL_CACHE = 64 << 20


@dataclass
class Results:
    """All samples of a run; medians are taken when it is shown."""

    nbytes: int = 0
    samples: dict[Situation, dict[str, list[Sample]]] = field(default_factory=dict)
    without_save: dict[Situation, list[float]] = field(default_factory=dict)
    raw_rates: list[float] = field(default_factory=list)
    stage_costs: list[StageCost] = field(default_factory=list)


def run(directory: Path, state_bytes: int, repeats: int, threads: int, log: Console) -> Results:
    """Measure everything, interleaved: every repeat goes through all contenders and the raw disk."""
    context = multiprocessing.get_context("spawn")
    results = Results()
    roomy = -(-(state_bytes + (256 << 20)) // (64 << 20)) * (64 << 20)
    makers = (stock_contenders, DataStatesContender(roomy), DataStatesContender(_SMALL_CACHE))
    workers = [Worker(context, maker, state_bytes, threads) for maker in makers]
    results.nbytes = workers[0].nbytes
    names = [name for worker in workers for name in worker.names]
    for situation in SITUATIONS:
        results.samples[situation] = {name: [] for name in names}
    turns = [(worker, index) for worker in workers for index in range(len(worker.names))]
    for repeat in range(repeats + 1):  # the first is a warm-up
        log.print(f"repeat {repeat} of {repeats}" if repeat else "warm-up")
        if repeat:
            results.raw_rates.append(raw_write_rate(directory, results.nbytes))
        for situation in SITUATIONS:
            for worker, index in turns[repeat % len(turns) :] + turns[: repeat % len(turns)]:
                sample = worker.measure(index, situation, directory / "checkpoint")
                if repeat:
                    results.samples[situation][worker.names[index]].append(sample)
            if repeat and situation != "idle":
                seconds = workers[0].measure_without_save(situation)
                results.without_save.setdefault(situation, []).append(seconds)
    for worker in workers:
        worker.close()
    log.print("stage() of 1,000 tensors")
    results.stage_costs = stage_costs(context, directory, [128 << 10, 4 << 10], saves=60)
    return results


def show(results: Results, console: Console) -> None:
    """Print medians; the ratios are to the first contender, plain FileSystemWriter."""
    raw = median(results.raw_rates)
    console.print(
        f"\n{results.nbytes / (1 << 30):.2f} GiB on one rank, medians of {len(results.raw_rates)}; "
        f"raw disk (O_DIRECT, 4 threads, fdatasync): {raw / 1e9:.2f} GB/s\n"
    )
    for situation, by_name in results.samples.items():
        console.print(_situation_table(results, situation, by_name, raw))
    for cost in results.stage_costs:
        console.print(
            f"{cost.tensors} tensors of {cost.bytes_per_tensor >> 10} KiB: "
            f"{cost.stage_ms:.2f} ms in stage(), {cost.async_save_ms:.2f} ms in async_save "
            f"(medians of {cost.saves})"
        )


def _situation_table(
    results: Results, situation: Situation, by_name: dict[str, list[Sample]], raw: float
) -> Table:
    title = SITUATIONS[situation]
    if situation in results.without_save:
        without = median(results.without_save[situation])
        title += f" (the iteration without a save: {without * 1e3:.0f} ms)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("writer")
    columns = [
        "async_save ms",
        "gate ms",
        "stall ms",
        "ratio",
        "iteration ms",
        "commit ms",
        "ratio",
    ]
    for column in [*columns, "GB/s", "of raw"]:
        table.add_column(column, justify="right")
    rows = {name: _medians(samples) for name, samples in by_name.items()}
    reference = next(iter(rows.values()))
    for name, row in rows.items():
        rate = results.nbytes / row.commit
        table.add_row(
            name,
            f"{row.call * 1e3:.2f}",
            f"{row.gate * 1e3:.2f}",
            f"{row.stall * 1e3:.2f}",
            f"{reference.stall / row.stall:.1f} x",
            f"{row.iteration * 1e3:.0f}",
            f"{row.commit * 1e3:.0f}",
            f"{reference.commit / row.commit:.1f} x",
            f"{rate / 1e9:.2f}",
            f"{rate / raw:.0%}",
        )
    return table


def _medians(samples: list[Sample]) -> Sample:
    columns = zip(*(asdict(sample).values() for sample in samples), strict=True)
    return Sample(*map(median, columns))


def as_json(results: Results, directory: Path, repeats: int, threads: int) -> dict[str, Any]:
    """Everything that was measured, and on what."""
    return {
        **describe(directory),
        "benchmark": "stall",
        "repeats": repeats,
        "torch_threads": threads,
        **asdict(results),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cpus(), help="of torch's operators")
    parser.add_argument(
        "--dir", type=Path, default=_HERE.parent / "build", help="where the checkpoints go"
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=_HERE / "results" / f"stall-{date.today().isoformat()}.json",
        help="where the results go",
    )
    arguments = parser.parse_args()

    console = Console(width=160 if not sys.stdout.isatty() else None)
    arguments.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="stall-", dir=arguments.dir))
    try:
        results = run(
            directory,
            int(arguments.gib * (1 << 30)),
            arguments.repeats,
            arguments.threads,
            Console(stderr=True),
        )
        record = as_json(results, directory, arguments.repeats, arguments.threads)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    show(results, console)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"\nwritten to {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
