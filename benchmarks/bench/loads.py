"""Loads into existing tensors: from the disk and from the page cache, of all tensors and of one of many."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from bench.loaders import LOADERS, Load, Loader
from bench.samples import Column, Row, Table, describe_error, interleave
from bench.savers import SAVERS
from bench.states import CASES, State, make
from bench.system import Peak, cpu_seconds, drop, sync_tree, warm
from disk import raw_read_rate

COLUMNS = (
    Column("cold", "cold", "s", compared=True),
    Column("of_raw", "of the raw disk", "%"),
    Column("warm", "warm", "s", compared=True),
    Column("cpu", "processor, cold", "s"),
    Column("memory", "extra memory", "MiB"),
)
ABOUT = (
    "Into existing tensors; cold: the kernel was asked to drop the files' pages; warm: they were read before. "
    "Extra memory: growth of the resident memory, mapped files included, in the cold load. The first load is not "
    "measured; its values are compared with what was saved. {tensors:,} tensors, {gb:.2f} GB; raw disk: {raw:.2f}"
    " GB/s ({low:.2f} to {high:.2f})."
)
ABOUT_ONE = "One tensor of {tensors:,} ({gb:.2f} GB), into an existing tensor."


def measure(
    case: str,
    scale: float,
    rounds: int,
    directory: Path,
    loaders: Sequence[Loader] = LOADERS,
    *,
    one: bool = False,
) -> Table:
    """``one``: load one of the tensors."""
    state = make(case, scale)
    names = list(state.parameters)
    if one:
        names = names[len(names) // 2 :][:1]
    rows, loads = _prepare(loaders, state, names, directory)
    raw: dict[int, float] = {}
    written = directory / "raw"
    with written.open("wb") as file:
        for tensor in state.tensors.values():
            file.write(tensor.numpy())
    sync_tree(directory)

    def sample(row: Row, number: int) -> dict[str, float]:
        if number not in raw:
            raw[number] = raw_read_rate(written)
        path, load = loads[row.name]
        into = {name: state.tensors[name] for name in names}
        gc.collect()
        drop(path)
        memory, processor, begun = Peak(), cpu_seconds(), time.perf_counter()
        load(path, into)
        found = {"cold": time.perf_counter() - begun}
        found |= {"cpu": cpu_seconds() - processor, "memory": memory.grown() / (1 << 20)}
        if not one:
            found["of_raw"] = 100 * state.nbytes / found["cold"] / raw[number]
        gc.collect()
        warm(path)
        begun = time.perf_counter()
        load(path, into)
        found["warm"] = time.perf_counter() - begun
        return found

    interleave(rows, rounds, sample)
    rates = sorted(rate / 1e9 for rate in raw.values()) or [0.0]
    facts = {"tensors": len(state.parameters), "gb": state.nbytes / 1e9}
    facts |= {"raw": rates[len(rates) // 2], "low": rates[0], "high": rates[-1]}
    shutil.rmtree(directory)
    directory.mkdir()
    if one:
        columns = [column for column in COLUMNS if column.key != "of_raw"]
        return Table(
            f"Loads: one of {CASES[case]}",
            ABOUT_ONE.format(**facts),
            columns,
            rows,
            f"loads.one.{case}",
            facts,
        )
    return Table(
        f"Loads: {CASES[case]}", ABOUT.format(**facts), COLUMNS, rows, f"loads.{case}", facts
    )


def _prepare(
    loaders: Sequence[Loader], state: State, names: Collection[str], directory: Path
) -> tuple[list[Row], dict[str, tuple[Path, Load]]]:
    """Each has a checkpoint, and has loaded it once, unmeasured, with the values that were saved."""
    savers = {saver.name: saver for saver in SAVERS}
    rows, loads = [], {}
    for loader in loaders:
        row = Row(loader.name, loader.own)
        rows.append(row)
        path = directory / f"of-{[*savers].index(loader.saver)}"
        try:
            if not path.exists():
                savers[loader.saver].prepare(state)(path).commit()
                sync_tree(path)
            load = loader.prepare()
            into = {name: state.tensors[name].clone().zero_() for name in names}
            load(path, into)
            for name, tensor in into.items():
                if not tensor.equal(state.tensors[name]):
                    raise ValueError(f"loads another value of {name} than was saved")
            loads[loader.name] = path, load
        except Exception as error:
            row.error = describe_error(error)
    return rows, loads
