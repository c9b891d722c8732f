"""What is known of the demo's runs: a table while one goes on, and a page at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

LOSS_TOLERANCE = 1e-4  # relative; not zero: another number of ranks adds in another order

WRITERS: dict[str, str] = {
    "stock": "FileSystemWriter",
    "staged": "DefaultStager + FileSystemWriter",
    "datastates": "DataStatesWriter",
}
"""By the phase of the demo; the second is the best mode of stock DCP."""
CHART_WIDTH = 52


@dataclass(frozen=True)
class Saved:
    """A committed save. Durations are in milliseconds, the longest of any rank."""

    nbytes: int  # of all ranks, on storage
    rate: float  # GB/s, from the first byte that could be read to the last that is durable
    stall: float  # what the save itself takes from training: call and gate
    call: float  # in async_save, or in the manager's save()
    gate: float  # before optimizer.step(), waiting for the save's reads or for the stager's copies
    wait: float  # for this save's commit, before the next save
    commit: float  # from the call to the commit
    iteration: float  # from this save to the next, or to the end of the job


@dataclass
class Run:
    """What rank 0 sends to the driver at each change. Losses and saves are by iteration, from 1."""

    phase: str  # a key of WRITERS, or "resumed"
    ranks: int
    layout: str
    parameters: int
    resumed_from: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    saves: dict[int, Saved] = field(default_factory=dict)
    killed: bool = False

    @property
    def title(self) -> str:
        if self.phase == "resumed":
            return f"{WRITERS['datastates']}, resumed on {self.ranks} ranks ({self.layout})"
        return f"{WRITERS[self.phase]}, {self.ranks} ranks ({self.layout})"

    def typical(self, part: str) -> float:
        """The median over all saves of a field of :class:`Saved`."""
        return median(getattr(each, part) for each in self.saves.values())


def show(news: Iterable[Run], console: Console) -> list[Run]:
    """All runs of a job. The newest one's table is live; of the others, a line stays on the screen."""
    runs: dict[str, Run] = {}
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for run in news:
            if runs and run.phase not in runs:
                _say_what_ended(list(runs.values())[-1], console)
            runs[run.phase] = run
            live.update(_iterations(run), refresh=True)
    _say_what_ended(run, console)
    return list(runs.values())


def _say_what_ended(run: Run, console: Console) -> None:
    end = "SIGKILL to all ranks" if run.killed else "done"
    console.print(f"{run.title}: iterations {min(run.losses)} to {max(run.losses)}, {end}")


def _iterations(run: Run) -> Table:
    """A row for each iteration, filled in when its save is committed."""
    table = _table(run.title, "iteration", "loss", "stall ms", "MB", "committed", min_width=9)
    for number, loss in run.losses.items():
        cells = ["", "", "…"]
        if saved := run.saves.get(number):
            cells = [f"{saved.stall:.1f}", f"{saved.nbytes / 1e6:.0f}", f"step {number}"]
        table.add_row(str(number), f"{loss:.4f}", *cells)
    return table


def report_losses(stock: Run, killed: Run, resumed: Run, console: Console) -> None:
    """Print the losses side by side; end the demo with an error where they differ."""
    columns = ("iteration", "uninterrupted", "resumed", "relative difference")
    table = _table("\nLosses after the resume", *columns)
    for number, loss in resumed.losses.items():
        expected = stock.losses[number]
        difference = f"{abs(loss / expected - 1):.1e}"
        table.add_row(str(number), f"{expected:.6f}", f"{loss:.6f}", difference)
    console.print(table)
    for name, run in (("killed", killed), ("resumed", resumed)):
        worst = max(abs(loss / stock.losses[number] - 1) for number, loss in run.losses.items())
        if not worst <= LOSS_TOLERANCE:
            sys.exit(f"the demo failed: the {name} job's losses differ by {worst:.1e}")


def report_stalls(runs: list[Run], console: Console) -> None:
    """Print what a save took from training with each writer, as numbers and as a chart."""
    counts = " and ".join(str(len(run.saves)) for run in runs)
    title = f"A save, in ms: medians of {counts}, the slowest of {runs[0].ranks} ranks"
    table = _table(title, "", *(WRITERS[run.phase] for run in runs))
    table.columns[0].justify = "left"
    for name, part in (
        ("training waits", "stall"),
        ("  in async_save", "call"),
        ("  before the step", "gate"),
        ("until the commit", "commit"),
        ("an iteration", "iteration"),
    ):
        table.add_row(name, *(f"{run.typical(part):.1f}" for run in runs))
    console.print(table)
    console.print(_chart(runs))


def _chart(runs: list[Run]) -> Table:
    """Of each writer, an iteration and the save beside it, on one axis of time."""
    longest = max(max(run.typical("iteration"), run.typical("commit")) for run in runs)
    scale = CHART_WIDTH / longest
    chart = Table.grid(padding=(0, 1))
    chart.title, chart.title_justify = "An iteration, and the save beside it", "left"
    for run in runs:
        call, gate, wait = (_length(run.typical(part), scale) for part in ("call", "gate", "wait"))
        trains = max(round(run.typical("iteration") * scale) - call - gate - wait, 0)
        training = Text("▓" * call, "red").append("█" * trains, "green")
        training.append("▓" * (gate + wait), "red")
        save = Text("━" * _length(run.typical("commit"), scale), "cyan")
        chart.add_row(WRITERS[run.phase].replace(" + ", " +\n"), training.append("\n").append(save))
    chart.caption = f"█ training   ▓ training waits   ━ the save   (width: {longest:.0f} ms)"
    chart.caption_justify = "left"
    return chart


def _length(milliseconds: float, scale: float) -> int:
    """In characters; what is below a tenth of a millisecond is not drawn, and all else is seen."""
    return max(round(milliseconds * scale), 1) if milliseconds >= 0.1 else 0


def say_what_comes_next(runs: list[Run], resumed: Run, seconds: float, console: Console) -> None:
    """Print what the demo has shown, and what to do after it."""
    stalls = ", ".join(f"{run.typical('stall'):.0f} ms with {WRITERS[run.phase]}" for run in runs)
    python = os.path.relpath(sys.executable)
    text = f"""
[bold]What you have seen[/], in {seconds:.0f} s
- A save of {next(iter(resumed.saves.values())).nbytes / 1e6:.0f} MB in every iteration. \
It made training wait for {stalls}, which reads the tensors during the next backward pass.
- A kill in the middle of a save. That save is lost and no other: the job went on from step \
{resumed.resumed_from}, with half the ranks on another mesh, and has the losses of the uninterrupted run.

[bold]What to do next[/]
- The smallest program: {python} examples/quick_start.py 100. Interrupt it, and start it again.
- Programs to start from, in docs/index.md: FSDP2, Lightning, the Trainer, Slurm, a bucket.
- What a save costs at the size of an LLM: README.md. `make bench` measures it on this machine.
"""
    console.print(text, highlight=False)


def _table(title: str, *columns: str, min_width: int | None = None) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right", min_width=min_width)
    return table
