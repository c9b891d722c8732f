"""What was measured: rows of samples, their medians and spreads, and how they compare with the best peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Column:
    key: str
    heading: str
    unit: str = ""
    compared: bool = False
    """Whether a lower figure is better, and is compared with that of the best peer."""


@dataclass
class Row:
    name: str
    own: bool = False
    """Of this package: all others are peers."""
    error: str = ""
    """Why it has no samples."""
    samples: list[dict[str, float]] = field(default_factory=list)
    """One a round; keys are those of columns."""


@dataclass
class Table:
    title: str
    about: str
    columns: Sequence[Column]
    rows: list[Row]
    key: str = ""
    """By which the report finds it."""
    facts: dict[str, float] = field(default_factory=dict)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "low": min(values), "high": max(values), "n": len(values)}


def summary(table: Table) -> dict[str, Any]:
    """The table as the report's JSON has it: of each figure median, spread and n, and "of_best".

    "of_best" is the median of the best peer over the row's: 2 if the row takes half of it.
    """
    figures = {
        row.name: {
            column.key: spread([sample[column.key] for sample in row.samples])
            for column in table.columns
            if row.samples and column.key in row.samples[0]
        }
        for row in table.rows
    }
    for column in (column for column in table.columns if column.compared):
        peers = [figures[row.name].get(column.key) for row in table.rows if not row.own]
        best = min((peer["median"] for peer in peers if peer), default=0.0)
        for each in figures.values():
            if best and column.key in each and each[column.key]["median"]:
                each[column.key]["of_best"] = best / each[column.key]["median"]
    return {
        "key": table.key,
        "title": table.title,
        "about": table.about,
        "facts": table.facts,
        "columns": [vars(column) for column in table.columns],
        "rows": [
            {
                "name": row.name,
                "own": row.own,
                "error": row.error,
                "figures": figures[row.name],
                "samples": row.samples,
            }
            for row in table.rows
        ],
    }


def interleave(
    rows: Sequence[Row], rounds: int, measure: Callable[[Row, int], dict[str, float]]
) -> None:
    """A sample of each row in each round, in another order each time; one that raises has an error from then on."""
    for number in range(rounds):
        for row in Random(number).sample(rows, len(rows)):
            if row.error:
                continue
            try:
                row.samples.append(measure(row, number))
            except Exception as error:
                row.error, row.samples = describe_error(error), []


def describe_error(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"
