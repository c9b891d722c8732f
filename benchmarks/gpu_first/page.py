"""The page of text: how the steps ended, and what they found."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from gpu_first.output import table

_WIDTH = 120


def page(document: Mapping[str, Any]) -> str:
    """``document`` is the runner's, as far as it got. Steps of one module share a table."""
    lines = [f"The first half hour on a GPU, {document['date']}, torch {document['torch']}"]
    if document["smoke"]:
        lines.insert(0, "SMOKE, ON THE HOST, AT A TINY SIZE: no figure says anything of a GPU")
    rows = []
    for step in document["steps"]:
        outcome = "passed" if step["passed"] else f"FAILED ({step['exit_code']})"
        rows.append((step["name"], outcome, f"{step['seconds']:.0f} s", f"{step['limit']:.0f} s"))
    lines += ["", *table(("step", "", "took", "limit"), rows)]
    for module, group in groupby(document["steps"], key=lambda step: step["module"]):
        steps = list(group)
        lines += ["", module, *(_pytest(steps) if module == "pytest" else _found(steps))]
    return "\n".join(line[:_WIDTH].rstrip() for line in lines) + "\n"


def _pytest(steps: list[Mapping[str, Any]]) -> list[str]:
    """What failed or was skipped, what took longest, and the last line."""
    kept = re.compile(r"FAILED|ERROR|SKIPPED|\d+\.\d+s (call|setup)|=+ .* in \d")
    return [line for step in steps for line in step["last_lines"] if kept.match(line)]


def _found(steps: list[Mapping[str, Any]]) -> list[str]:
    """Figures in a table, with a row for each part, and lines for the rest."""
    parts = [(f"{s['name']} {name}", each) for s in steps for name, each in s["found"].items()]
    figures = {name: each for name, each in parts if isinstance(each, dict)}
    columns = list(dict.fromkeys(key for each in figures.values() for key in each))
    rows = [
        (name, *(_text(each.get(key, "")) for key in columns)) for name, each in figures.items()
    ]
    lines = table(("", *columns), rows) if rows else []
    for name, each in parts:
        if not isinstance(each, dict):
            lines += f"{name}: {_text(each)}".splitlines()
    return lines


def _text(value: Any) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else str(value)
