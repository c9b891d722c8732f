"""The live table: a row per iteration, filled in as its save is committed."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from events import Begun, Event, Phase
from journal import Journal, PhaseJournal

_TITLES: dict[Phase, str] = {
    "stock": "uninterrupted run, saved with stock FileSystemWriter",
    "datastates": "the same run, saved with DataStatesWriter, until it is killed",
    "resumed": "resumed, saved with DataStatesWriter",
}


def _title(begun: Begun) -> str:
    origin = f", from step {begun.resumed_from}" if begun.resumed_from else ""
    size = f"{begun.parameters / 1e6:.1f} M parameters"
    return f"{_TITLES[begun.phase]} ({begun.ranks} ranks, {begun.layout}, {size}{origin})"


def phase_table(phase: PhaseJournal) -> Table:
    """All iterations of ``phase`` so far."""
    table = Table(title=_title(phase.begun), title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("iteration", "loss", "stall ms", "MB", "GB/s", "committed"):
        table.add_column(column, justify="right", min_width=9)
    for iteration, step in phase.steps.items():
        saved = phase.saves.get(iteration)
        row = [str(iteration), f"{step.loss:.4f}"]
        if saved:
            rate = saved.nbytes / saved.write_seconds / 1e9
            row += [
                f"{saved.stall_seconds * 1e3:.1f}",
                f"{saved.nbytes / 1e6:.0f}",
                f"{rate:.2f}",
                f"step {iteration}",
            ]
        elif phase.killed and iteration == phase.killed.iteration:
            row += ["", "", "", "[red]SIGKILL"]
        else:
            row += ["", "", "", "…"]
        table.add_row(*row)
    return table


class LiveTable:
    """One live table per phase; the finished ones stay on the screen above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._journal = Journal()
        self._live: Live | None = None

    @property
    def journal(self) -> Journal:
        return self._journal

    def note(self, event: Event) -> None:
        """Take ``event`` in and show it."""
        phase = self._journal.note(event)
        if isinstance(event, Begun):
            self.close()
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        if self._live:
            self._live.update(phase_table(phase), refresh=True)

    def close(self) -> None:
        """Leave the current table on the screen as it is."""
        if self._live:
            self._live.stop()
            self._live = None
            self._console.print()
