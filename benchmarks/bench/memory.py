"""The memory of the host that saves take, each saver in a process of its own."""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from bench.samples import Column, Row, Table, describe_error
from bench.savers import SAVERS, Commit, Saver, start_process_group
from bench.states import CASES, State, make
from bench.system import resident_bytes

SAVES = 3
SECONDS = 0.002
"""Between two looks."""
MOST_SECONDS = 180
"""Of a saver."""
COLUMNS = (
    Column("peak", "most during a save", "MiB", compared=True),
    Column("of_state", "of the state's bytes", "%"),
    Column("kept", "between saves", "MiB"),
)
ABOUT = (
    "{tensors:,} tensors, {gb:.2f} GB in the host's memory, saved {saves} times by a process that does nothing else. "
    "Memory beyond what the process had before the first save, looked at every {ms:.0f} ms: resident pages of the "
    "process and of those it started, shared pages counted once, the page cache not at all."
)


class Peak(threading.Thread):
    """Looks at the memory until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self._stop_now = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._stop_now.wait(SECONDS):
            self.most = max(self.most, resident_bytes())

    def stop(self) -> int:
        self._stop_now.set()
        self.join()
        return self.most


def measure(case: str, scale: float, directory: Path, savers: Sequence[Saver] = SAVERS) -> Table:
    rows = [_row(saver, case, scale, directory) for saver in savers]
    state = make(case, scale)
    facts = {"tensors": len(state.parameters), "gb": state.nbytes / 1e9}
    about = ABOUT.format(**facts, saves=SAVES, ms=1e3 * SECONDS)
    return Table(f"Memory: {CASES[case]}", about, COLUMNS, rows, f"memory.{case}", facts)


def _row(saver: Saver, case: str, scale: float, directory: Path) -> Row:
    row = Row(saver.name, saver.own)
    command = [sys.executable, "-m", "bench.memory", saver.name, "--case", case]
    command += ["--scale", str(scale), "--dir", str(directory)]
    folder = Path(__file__).parents[1]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=MOST_SECONDS
        )
        found = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
        row.error = found.pop("error", "" if found else f"the process ended with {done.returncode}")
        row.samples = [found] if found else []
    except subprocess.TimeoutExpired:
        row.error = f"not done after {MOST_SECONDS} s"
    except Exception as error:
        row.error = describe_error(error)
    return row


def sample(saver: Saver, state: State, directory: Path) -> dict[str, float]:
    before = resident_bytes()
    save = saver.prepare(state)
    peak = Peak()
    for number in range(SAVES):
        path = directory / f"memory-{number}"
        started = save(path)
        commit = Commit(started, path)
        started.may_step()
        state.optimizer.step()
        commit.wait()
        shutil.rmtree(path)
    most = peak.stop() - before
    gc.collect()
    kept = resident_bytes() - before
    mib = 1 << 20
    return {"peak": most / mib, "of_state": 100 * most / state.nbytes, "kept": kept / mib}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("saver")
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    arguments = parser.parse_args()
    start_process_group()
    saver = next(each for each in SAVERS if each.name == arguments.saver)
    try:
        found: dict[str, object] = {}
        found |= sample(saver, make(arguments.case, arguments.scale), arguments.dir)
    except Exception as error:
        found = {"error": describe_error(error)}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
