"""Training whose accelerator computes while the host idles: what saves take from it, end to end."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from bench.samples import Column, Row, Table, describe_error, interleave
from bench.savers import SAVERS, Commit, Save, Started
from bench.states import State, make
from disk import raw_write_rate

WRITERS = (
    "ours",
    "`FileSystemWriter`, 4 threads",
    "`DefaultStager`, 4 threads",
    "torch_checkpointing",
    "`torch.save`",
)
NONE = "no saves"
EVERY = {1: 10, 10: 20, 100: 100}
"""Of each interval, in steps, how many steps are measured."""

_FREE = 0.02
"""Saves are free if iterations take at most so much longer."""
_STEPS = 8
_HALVINGS = 5

COLUMNS = (
    Column("iteration1", "iteration, saved every step", "ms", compared=True),
    *(Column(f"over{every}", f"over no saves, every {every}", "%") for every in EVERY),
)
ABOUT = (
    "An iteration: {sleep:.0f} ms in which an accelerator computes and the host sleeps, then `optimizer.step()`. "
    "{gb:.2f} GB, for which the raw disk needs {raw:.0f} ms. A save begins behind the step, once the one before "
    "it is durable; end to end, that wait included."
)
SHORTEST = (
    Column("shortest", "shortest iteration", "ms", compared=True),
    Column("of_raw", "over what the raw disk needs", "×"),
    Column("over", "iterations longer by", "%"),
)
ABOUT_SHORTEST = (
    "Found by halving: the shortest iteration that saves at every step make at most {free:.0f} % longer. "
    "Iterations of more than {most:.0f} ms were not tried. {gb:.2f} GB, for which the raw disk needs {raw:.0f} "
    "ms."
)


def train(
    state: State, save: Save | None, directory: Path, sleep: float, steps: int, every: int
) -> float:
    """Seconds of an iteration, the mean of ``steps``."""
    pending = Started()
    begun = time.perf_counter()
    for step in range(steps):
        if save is not None and step % every == 0:
            pending.commit()
            pending = save(directory / str(step))
        time.sleep(sleep)
        pending.may_step()
        state.optimizer.step()
    seconds = time.perf_counter() - begun
    pending.commit()
    for path in directory.iterdir():
        shutil.rmtree(path)
    return seconds / steps


def measure_intervals(
    scale: float, rounds: int, directory: Path, sleep: float, names: Sequence[str] = WRITERS
) -> Table:
    state = make("llm", scale)
    rows, saves = _prepare(state, directory, names)
    rows.insert(0, Row(NONE, own=True))
    raw = state.nbytes / raw_write_rate(directory, state.nbytes)
    none: dict[tuple[int, int], float] = {}

    def sample(row: Row, number: int) -> dict[str, float]:
        found = {}
        for every, steps in EVERY.items():
            if (number, every) not in none:
                none[number, every] = train(state, None, directory, sleep, steps, every)
            if row.name == NONE:
                seconds = train(state, None, directory, sleep, steps, every)
            else:
                seconds = train(state, saves[row.name], directory, sleep, steps, every)
            found[f"over{every}"] = 100 * (seconds / none[number, every] - 1)
            if every == 1 and row.name != NONE:
                found["iteration1"] = 1e3 * seconds
        return found

    interleave(rows, rounds, sample)
    facts = {"gb": state.nbytes / 1e9, "raw": 1e3 * raw, "sleep": 1e3 * sleep}
    title = "Training with an idling accelerator"
    return Table(title, ABOUT.format(**facts), COLUMNS, rows, "training", facts)


def measure_shortest(
    scale: float, rounds: int, directory: Path, most: float, names: Sequence[str] = WRITERS
) -> Table:
    state = make("llm", scale)
    rows, saves = _prepare(state, directory, names)
    raws: list[float] = []

    def sample(row: Row, number: int) -> dict[str, float]:
        if len(raws) <= number:
            raws.append(state.nbytes / raw_write_rate(directory, state.nbytes))

        def over(seconds: float) -> float:
            without = train(state, None, directory, seconds, _STEPS, 1)
            return train(state, saves[row.name], directory, seconds, _STEPS, 1) / without - 1

        found, longer = shortest(over, raws[number] / 4, most)
        if math.isinf(found):
            raise ValueError(f"not free at {1e3 * most:.0f} ms: longer by {100 * longer:.0f} %")
        return {
            "shortest": 1e3 * found,
            "of_raw": found / raws[number],
            "over": 100 * longer,
        }

    interleave(rows, rounds, sample)
    facts = {"gb": state.nbytes / 1e9, "raw": 1e3 * (median(raws) if raws else 0.0)}
    facts |= {"most": 1e3 * most, "free": 100 * _FREE}
    title = "The shortest iteration at which a save at every step is free"
    return Table(title, ABOUT_SHORTEST.format(**facts), SHORTEST, rows, "shortest", facts)


def shortest(over: Callable[[float], float], least: float, most: float) -> tuple[float, float]:
    """The least seconds at which ``over`` is free, and what it is there; infinity if it is not at ``most``."""
    found, longer = most, over(most)
    if longer > _FREE:
        return math.inf, longer
    for _ in range(_HALVINGS):
        tried = math.sqrt(least * found)
        if (now := over(tried)) <= _FREE:
            found, longer = tried, now
        else:
            least = tried
    return found, longer


def _prepare(
    state: State, directory: Path, names: Sequence[str]
) -> tuple[list[Row], dict[str, Save]]:
    rows, saves = [], {}
    for saver in (saver for saver in SAVERS if saver.name in names):
        row = Row(saver.name, saver.own)
        rows.append(row)
        try:
            save = _durable(saver.prepare(state))
            train(state, save, directory, 0.0, 3, 1)
            saves[saver.name] = save
        except Exception as error:
            row.error = describe_error(error)
    return rows, saves


def _durable(save: Save) -> Save:
    """The same, and what is committed is synced, in the thread that waits for it."""

    def saved(path: Path) -> Started:
        started = save(path)
        return Started(Commit(started, path).wait, started.may_step)

    return saved


def start_seconds(times: int) -> float:
    """From the start of a process until it has imported what it trains and loads with."""
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch, dcp_datastates"], check=True)
        found.append(time.perf_counter() - begun)
    return median(found)
