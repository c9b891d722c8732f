"""What is known of the demo's runs, as tables: one for each while it goes on, and two at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

LOSS_TOLERANCE = 1e-4  # relative; not zero: another number of ranks adds in another order

_TITLES: dict[str, str] = {
    "stock": "uninterrupted run, saved with stock FileSystemWriter",
    "datastates": "the same run, saved with DataStatesWriter, until it is killed",
    "resumed": "resumed, saved with DataStatesWriter",
}


@dataclass(frozen=True)
class Saved:
    """A committed save. Durations are in milliseconds, the longest of any rank."""

    nbytes: int  # of all ranks, on storage
    rate: float  # GB/s, from the first byte that could be read to the last that is durable
    stall: float  # what the save itself takes from training: call and gate
    call: float  # in async_save, or in the manager's save()
    gate: float  # in optimizer.step(), waiting for the save's reads
    wait: float  # for this save's commit, before the next save
    commit: float  # from the call to the commit
    iteration: float  # from this save to the next, or to the end of the job


@dataclass
class Run:
    """What rank 0 sends to the driver at each change. Losses and saves are by iteration, from 1."""

    phase: str  # a key of _TITLES
    ranks: int
    layout: str
    parameters: int
    resumed_from: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    saves: dict[int, Saved] = field(default_factory=dict)
    killed: bool = False


def show(news: Iterable[Run], console: Console) -> list[Run]:
    """All runs of a job. The newest one's table is live; the others stay on the screen above it."""
    runs: dict[str, Run] = {}
    with Live(console=console, auto_refresh=False) as live:
        for run in news:
            if runs and run.phase not in runs:
                console.print(*map(_iterations, runs.values()))
            runs[run.phase] = run
            live.update(_iterations(run), refresh=True)
    console.print()
    return list(runs.values())


def _iterations(run: Run) -> Table:
    """A row for each iteration, filled in when its save is committed."""
    origin = f", from step {run.resumed_from}" if run.resumed_from else ""
    size = f"{run.parameters / 1e6:.1f} M parameters"
    title = f"{_TITLES[run.phase]} ({run.ranks} ranks, {run.layout}, {size}{origin})"
    table = _table(title, "iteration", "loss", "stall ms", "MB", "GB/s", "committed", min_width=9)
    for number, loss in run.losses.items():
        cells = ["", "", "", "[red]SIGKILL" if run.killed else "…"]
        if saved := run.saves.get(number):
            cells = [f"{saved.stall:.1f}", f"{saved.nbytes / 1e6:.0f}", f"{saved.rate:.2f}"]
            cells.append(f"step {number}")
        table.add_row(str(number), f"{loss:.4f}", *cells)
    return table


def report_losses(stock: Run, killed: Run, resumed: Run, console: Console) -> None:
    """Print the losses side by side; end the demo with an error where they differ."""
    columns = ("iteration", "uninterrupted", "resumed", "relative difference")
    table = _table("losses after the resume", *columns)
    for number, loss in resumed.losses.items():
        expected = stock.losses[number]
        difference = f"{abs(loss / expected - 1):.1e}"
        table.add_row(str(number), f"{expected:.6f}", f"{loss:.6f}", difference)
    console.print(table)
    for name, run in (("killed", killed), ("resumed", resumed)):
        worst = max(abs(loss / stock.losses[number] - 1) for number, loss in run.losses.items())
        losses = f"the {name} job's {len(run.losses)} losses"
        console.print(f"largest relative difference of {losses}: {worst:.1e}")
        if not worst <= LOSS_TOLERANCE:
            sys.exit(f"the demo failed: {LOSS_TOLERANCE:.0e} is allowed")
    console.print("[green]the resumed losses are those of the uninterrupted run[/]\n")


def report_stalls(stock: Run, ours: Run, console: Console) -> None:
    """Print what a save took from training with either writer, in the same run."""
    title = f"one save, medians of {len(stock.saves)} and {len(ours.saves)}"
    table = _table(
        f"{title} (slowest of {ours.ranks} ranks)",
        "",
        "FileSystemWriter",
        "DataStatesWriter",
        "ratio",
    )
    table.columns[0].justify = "left"
    for name, unit, part in (
        ("stall: async_save + gate", "ms", "stall"),
        ("   in async_save", "ms", "call"),
        ("   in the step gate", "ms", "gate"),
        ("waiting for the save before", "ms", "wait"),
        ("from the call to the commit", "ms", "commit"),
        ("writing", "GB/s", "rate"),
        ("iteration with its stalls", "ms", "iteration"),
    ):
        theirs, mine = (
            median(getattr(each, part) for each in run.saves.values()) for run in (stock, ours)
        )
        better, worse = (theirs, mine) if unit == "GB/s" else (mine, theirs)
        ratio = f"{worse / better:.1f} x" if theirs and mine else ""
        table.add_row(name, f"{theirs:.2f} {unit}", f"{mine:.2f} {unit}", ratio)
    console.print(table)


def _table(title: str, *columns: str, min_width: int | None = None) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right", min_width=min_width)
    return table
