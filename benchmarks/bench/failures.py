"""What failures cost, reckoned from what the same run has measured.

A job saves every ``interval`` seconds: Young's optimum sqrt(2 × stall × MTBF) ("A first order approximation to the
optimum checkpoint interval", 1974), but not before the former save is durable. A failure loses half an interval, the
time until the newest save was durable, and the restart (start of the process, and cold load). The effective training
time ratio is the part of the time that goes into steps that last, to first order as in Kokolis et al., "Revisiting
Reliability in Large-Scale Machine Learning Research Clusters" (2024): (1 - lost / MTBF) / (1 + stall / interval).
"""

from __future__ import annotations

from typing import Any

from bench.samples import Column, Row, Table
from bench.savers import SAVERS

HOURS = (1, 3, 12)
COLUMNS = tuple(
    column
    for hours in HOURS
    for column in (
        Column(f"interval{hours}", f"MTBF {hours} h: interval", "s"),
        Column(f"lost{hours}", "lost per failure", "s"),
        Column(f"ratio{hours}", "effective", "%"),
        Column(f"wasted{hours}", "wasted per hour", "s", compared=True),
    )
)
ABOUT = (
    "Reckoned, not run, from the medians above ({gb:.2f} GB). Interval: Young's optimum sqrt(2 × stall × MTBF) "
    "(1974), and at least the time until durable. Lost per failure: interval / 2 + until durable + start of a "
    "process ({start:.1f} s) + cold load. Effective training time ratio: (1 - lost / MTBF) / (1 + stall / "
    "interval), to first order as Kokolis et al. (2024). Wasted: the rest of each hour."
)


def expected(
    stall: float, durable: float, restart: float, mtbf: float
) -> tuple[float, float, float]:
    """The interval, seconds lost per failure, and the effective training time ratio; all in seconds."""
    interval = max((2 * stall * mtbf) ** 0.5, durable)
    lost = interval / 2 + durable + restart
    return interval, lost, max(0.0, 1 - lost / mtbf) / (1 + stall / interval)


def reckon(saves: dict[str, Any], loads: dict[str, Any], start: float) -> Table:
    """``saves`` and ``loads`` are summaries of the tables for one case."""
    saved = {row["name"]: row for row in saves["rows"]}
    loaded = {row["name"]: row for row in loads["rows"]}
    rows = []
    for saver in (saver for saver in SAVERS if saver.loads_as):
        row = Row(saver.name, saver.own)
        rows.append(row)
        its_save, its_load = saved.get(saver.name, {}), loaded.get(saver.loads_as, {})
        if not its_save.get("figures") or not its_load.get("figures"):
            row.error = its_save.get("error") or its_load.get("error") or "not measured"
            continue
        stall = its_save["figures"]["stall"]["median"] / 1e3
        durable = its_save["figures"]["durable"]["median"]
        restart = start + its_load["figures"]["cold"]["median"]
        sample = {}
        for hours in HOURS:
            interval, lost, ratio = expected(stall, durable, restart, 3600 * hours)
            sample |= {f"interval{hours}": interval, f"lost{hours}": lost}
            sample |= {f"ratio{hours}": 100 * ratio, f"wasted{hours}": 3600 * (1 - ratio)}
        row.samples = [sample]
    facts = {"gb": saves["facts"].get("gb", 0.0), "start": start}
    title = "Failures: what they cost, and the effective training time"
    return Table(title, ABOUT.format(**facts), COLUMNS, rows, "failures", facts)
