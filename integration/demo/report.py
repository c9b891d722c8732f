"""The end of the demo: were the losses those of an uninterrupted run, and what did saving cost?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

from events import Saved
from journal import Journal, PhaseJournal

LOSS_TOLERANCE = 1e-4
"""Largest relative difference of a loss. Not zero: another number of ranks adds in another order."""


class DemoFailedError(Exception):
    """The demo did not show what it is there to show."""


def report_losses(journal: Journal, console: Console) -> None:
    """Print the losses side by side; raises :class:`DemoFailedError` where they differ."""
    uninterrupted = journal.phases["stock"].steps
    resumed = journal.phases["resumed"].steps
    table = Table(title="losses after the resume", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("iteration", "uninterrupted", "resumed", "relative difference"):
        table.add_column(column, justify="right")
    for iteration, step in resumed.items():
        expected = uninterrupted[iteration].loss
        difference = _relative(step.loss, expected)
        table.add_row(str(iteration), f"{expected:.6f}", f"{step.loss:.6f}", f"{difference:.1e}")
    console.print(table)

    for name, phase in (("killed", "datastates"), ("resumed", "resumed")):
        steps = journal.phases[phase].steps
        worst = max(
            _relative(step.loss, uninterrupted[iteration].loss) for iteration, step in steps.items()
        )
        console.print(
            f"largest relative difference of the {name} job's {len(steps)} losses: {worst:.1e}"
        )
        if not worst <= LOSS_TOLERANCE:
            raise DemoFailedError(
                f"a loss of the {name} job differs from the uninterrupted run's by {worst:.1e} "
                f"(relative); {LOSS_TOLERANCE:.0e} is allowed"
            )
    console.print("[green]the resumed losses are those of the uninterrupted run[/]\n")


def report_stalls(journal: Journal, console: Console) -> None:
    """Print what a save took from training with either writer, in the same run."""
    stock, ours = journal.phases["stock"], journal.phases["datastates"]
    table = Table(
        title=f"one save, medians of {len(stock.saves)} and {len(ours.saves)} "
        f"(slowest of {ours.begun.ranks} ranks)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("")
    for column in ("FileSystemWriter", "DataStatesWriter", "ratio"):
        table.add_column(column, justify="right")

    def row(name: str, unit: str, theirs: float, mine: float, ratio: float | None) -> None:
        shown = "" if ratio is None else f"{ratio:.1f} x"
        table.add_row(name, f"{theirs:.2f} {unit}", f"{mine:.2f} {unit}", shown)

    def durations(name: str, seconds: Callable[[Saved], float]) -> None:
        theirs = 1e3 * median(map(seconds, stock.saves.values()))
        mine = 1e3 * median(map(seconds, ours.saves.values()))
        row(name, "ms", theirs, mine, theirs / mine if theirs and mine else None)

    durations("stall: async_save + gate", lambda saved: saved.stall_seconds)
    durations("   in async_save", lambda saved: saved.call_seconds)
    durations("   in the step gate", lambda saved: saved.gate_seconds)
    durations("waiting for the save before", lambda saved: saved.wait_seconds)
    durations("from the call to the commit", lambda saved: saved.commit_seconds)
    theirs, mine = _rate(stock.saves.values()), _rate(ours.saves.values())
    row("writing", "GB/s", theirs, mine, mine / theirs)
    theirs, mine = _iteration(stock), _iteration(ours)
    row("iteration with its stalls", "ms", theirs, mine, theirs / mine)
    console.print(table)


def _rate(saves: Iterable[Saved]) -> float:
    return median(saved.nbytes / saved.write_seconds / 1e9 for saved in saves)


def _iteration(phase: PhaseJournal) -> float:
    """Milliseconds of an iteration, with what it waited for the save before."""
    return 1e3 * median(
        step.seconds + phase.saves[iteration - 1].wait_seconds
        for iteration, step in phase.steps.items()
        if iteration - 1 in phase.saves
    )


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / abs(expected)
