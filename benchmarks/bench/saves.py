"""Saves: what they take from training, and how long it takes until the bytes are durable."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from bench.samples import Column, Row, Table, describe_error, interleave
from bench.savers import SAVERS, Commit, Save, Saver
from bench.states import CASES, State, make
from bench.system import cpu_seconds
from disk import raw_write_rate

COLUMNS = (
    Column("stall", "stall", "ms", compared=True),
    Column("call", "of it the call", "ms"),
    Column("per_tensor", "call per tensor", "µs"),
    Column("durable", "until durable", "s", compared=True),
    Column("of_raw", "of the raw disk", "%"),
    Column("cpu", "processor", "s/GB", compared=True),
)
ABOUT = (
    "The call, then {pause:.2f} s in which an accelerator computes and the host waits, then `optimizer.step()`. "
    "Stall: the call, and what the step waits for. Until durable: from the call to the commit; what a peer leaves"
    " in the page cache is synced by the benchmark, in the thread that waits, and that counts. {tensors:,} "
    "tensors, {gb:.2f} GB; raw disk: {raw:.2f} GB/s ({low:.2f} to {high:.2f})."
)


def measure(
    case: str, scale: float, rounds: int, directory: Path, savers: Sequence[Saver] = SAVERS
) -> Table:
    state = make(case, scale)
    pause = 0.5 * state.nbytes / 1e9  # seconds: half of what a disk of 1 GB/s takes
    rows, saves = _prepare(savers, state, directory, pause)
    raw: dict[int, float] = {}

    def sample(row: Row, number: int) -> dict[str, float]:
        if number not in raw:
            raw[number] = raw_write_rate(directory, state.nbytes)
        saver, save = saves[row.name]
        found = _once(save, state, directory / "checkpoint", pause if saver.pauses else 0.0)
        found["of_raw"] = 100 * state.nbytes / found["durable"] / raw[number]
        return found

    interleave(rows, rounds, sample)
    rates = sorted(rate / 1e9 for rate in raw.values()) or [0.0]
    facts = {"tensors": len(state.parameters), "gb": state.nbytes / 1e9, "pause": pause}
    facts |= {"raw": rates[len(rates) // 2], "low": rates[0], "high": rates[-1]}
    title = f"Saves: {CASES[case]}"
    return Table(title, ABOUT.format(**facts), COLUMNS, rows, f"saves.{case}", facts)


def _prepare(
    savers: Sequence[Saver], state: State, directory: Path, pause: float
) -> tuple[list[Row], dict[str, tuple[Saver, Save]]]:
    """Each has saved once or more, unmeasured; or has an error."""
    rows, saves = [], {}
    for saver in savers:
        row = Row(saver.name, saver.own)
        rows.append(row)
        try:
            save = saver.prepare(state)
            for _ in range(saver.warm_ups):
                _once(save, state, directory / "checkpoint", pause)
            saves[saver.name] = saver, save
        except Exception as error:
            row.error = describe_error(error)
    return rows, saves


def _once(save: Save, state: State, path: Path, pause: float) -> dict[str, float]:
    """One save; what it left is removed."""
    shutil.rmtree(path, ignore_errors=True)  # of one that failed
    processor = cpu_seconds()
    begun = time.perf_counter()
    started = save(path)
    called = time.perf_counter()
    commit = Commit(started, path)
    if commit.is_alive():
        time.sleep(pause)
    waiting = time.perf_counter()
    started.may_step()
    waited = time.perf_counter() - waiting
    state.optimizer.step()
    commit.wait()
    processor = cpu_seconds() - processor
    stall = called - begun + waited + started.gate()
    shutil.rmtree(path)
    return {
        "stall": 1e3 * stall,
        "call": 1e3 * (called - begun),
        "per_tensor": 1e6 * (called - begun) / len(state.parameters),
        "durable": commit.at - begun,
        "cpu": processor / (state.nbytes / 1e9),
    }
