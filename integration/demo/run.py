"""The demo: train and save every iteration, get killed, resume on fewer ranks.

    python integration/demo/run.py

Ends with status 0 if the resumed job's losses are those of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from checkpoints import is_committed, newest_committed, size_on_storage, step_path
from launch import Outcome, run_job
from report import DemoFailedError, report_losses, report_stalls
from table import LiveTable

FIRST_RANKS = 4
RESUMED_RANKS = 2
LIMIT_SECONDS = 240.0
"""For each of the two jobs; they take about 20 seconds and 10."""


def _first_job(root: Path, iterations: int, table: LiveTable, console: Console) -> int:
    """Run the first job to its death; returns the newest committed iteration."""
    outcome = run_job(
        "first",
        ranks=FIRST_RANKS,
        root=root,
        iterations=iterations,
        hear=table.note,
        limit_seconds=LIMIT_SECONDS,
    )
    table.close()
    phase = table.journal.phases.get("datastates")
    if phase is None or phase.killed is None:
        raise _failure("the first job ended before it was to be killed", outcome)
    checkpoints = root / "datastates"
    torn = step_path(checkpoints, phase.killed.iteration)
    newest = newest_committed(checkpoints)
    if newest is None:
        raise _failure("the first job left no committed checkpoint", outcome)
    console.print(
        f"killed all {FIRST_RANKS} ranks (SIGKILL) while the save of step "
        f"{phase.killed.iteration} was in flight: {size_on_storage(torn) / 1e6:.0f} MB of it lie in "
        f"{torn.name}, {'committed after all' if is_committed(torn) else 'not committed'}\n"
        f"resuming on {RESUMED_RANKS} ranks from the newest committed checkpoint, step {newest}\n"
    )
    return newest


def _resumed_job(root: Path, iterations: int, table: LiveTable, newest: int) -> None:
    outcome = run_job(
        "resume",
        ranks=RESUMED_RANKS,
        root=root,
        iterations=iterations,
        hear=table.note,
        limit_seconds=LIMIT_SECONDS,
    )
    table.close()
    phase = table.journal.phases.get("resumed")
    if outcome.status != 0 or phase is None:
        raise _failure("the resumed job failed", outcome)
    if phase.begun.resumed_from != newest or phase.newest_committed != iterations:
        raise _failure(
            f"the resumed job went from step {phase.begun.resumed_from} to "
            f"{phase.newest_committed}, not from {newest} to {iterations}",
            outcome,
        )


def _failure(reason: str, outcome: Outcome) -> DemoFailedError:
    return DemoFailedError(f"{reason} (status {outcome.status}):\n{outcome.output}")


def run(root: Path, iterations: int, console: Console) -> None:
    """The whole demo; raises :class:`DemoFailedError` where it shows anything but what it should."""
    table = LiveTable(console)
    try:
        newest = _first_job(root, iterations, table, console)
        _resumed_job(root, iterations, table, newest)
    finally:
        table.close()
    report_losses(table.journal, console)
    report_stalls(table.journal, console)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=12, help="of the uninterrupted run")
    parser.add_argument(
        "--dir",
        type=Path,
        help="where to put the checkpoints (a new directory there, removed after)",
    )
    arguments = parser.parse_args()
    if arguments.iterations < 8:
        parser.error("--iterations must be at least 8, so that there is a middle to be killed in")

    console = Console()
    begun = time.perf_counter()
    root = Path(tempfile.mkdtemp(prefix="dcp-datastates-demo-", dir=arguments.dir))
    try:
        run(root, arguments.iterations, console)
    except DemoFailedError as failure:
        console.print(f"[red]the demo failed:[/] {failure}", markup=True, highlight=False)
        return 1
    finally:
        shutil.rmtree(root, ignore_errors=True)
    console.print(f"all in {time.perf_counter() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
