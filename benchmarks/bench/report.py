"""The report as text and as a picture, both of the JSON document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_READ = (
    "Figures are medians, with (lowest to highest), of n rounds in which all took turns in one process, in "
    "another order each time. **×** compares with the best peer of the same run: 2× takes half as long. The raw "
    "disk is 4 threads with O_DIRECT and blocks of 8 MiB (and fdatasync), in the same rounds. Names of this "
    "package's rows are bold."
)


def markdown(document: dict[str, Any]) -> str:
    machine, versions = document["machine"], document["versions"]
    about = (
        f"{machine['cpus']} × {machine['cpu']}, {machine['memory_gib']} GiB, {machine['file_system']} on "
        f"{machine['disk']}; Linux {machine['kernel']}. {', '.join(' '.join(each) for each in versions.items())}. "
        f"{document['seconds'] / 60:.1f} minutes; load average at the end {document['load']:.1f}."
    )
    title = f"# Benchmark of {document['date'][:10]}{', quick' if document['quick'] else ''}"
    lines = [title, "", about, "", _READ]
    if document["quick"]:
        lines += ["", "**A quick run: small states and few rounds. Its figures scatter.**"]
    for table in document["tables"]:
        lines += ["", f"## {table['title']}", "", table["about"], "", *_table(table)]
    lines += ["", "## For the README", "", *readme(document)]
    return "\n".join(lines) + "\n"


def _table(table: dict[str, Any]) -> list[str]:
    columns = [
        column
        for column in table["columns"]
        if any(column["key"] in row["figures"] for row in table["rows"])
    ]
    failed = [
        f"- {row['name']}: `{row['error'].replace('`', chr(39))}`"
        for row in table["rows"]
        if row["error"]
    ]
    if failed:
        failed = ["", "Without figures:", "", *failed]
    if not columns:
        return failed
    heads = [f"{each['heading']}{', ' + each['unit'] if each['unit'] else ''}" for each in columns]
    lines = _rows(["", *heads, "n"])
    for row in (row for row in table["rows"] if row["figures"]):
        cells = [_cell(row["figures"].get(column["key"])) for column in columns]
        rounds = next(iter(row["figures"].values()))["n"]
        name = f"**{row['name']}**" if row["own"] else row["name"]
        lines.append(f"| {' | '.join([name, *cells, str(rounds)])} |")
    return lines + failed


def _rows(heads: list[str]) -> list[str]:
    return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]


def _cell(figure: dict[str, float] | None) -> str:
    if figure is None:
        return ""
    text = number(figure["median"])
    if figure["n"] > 1:
        text += f" ({number(figure['low'])} to {number(figure['high'])})"
    if "of_best" in figure:
        text += (
            f" **{figure['of_best']:.2g}×**"
            if figure["of_best"] < 10
            else f" **{figure['of_best']:.0f}×**"
        )
    return text


def number(value: float) -> str:
    """Three digits, and no exponent; percentages near 100 keep theirs."""
    if abs(value) >= 100 or not value:
        return f"{value:,.0f}"
    if 99 < abs(value) < 100:
        return f"{value:.3f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1g}"


def readme(document: dict[str, Any]) -> list[str]:
    """The table of the README: saves of an LLM's shapes, and the memory that they take."""
    tables = {table["key"]: table for table in document["tables"]}
    saves = tables.get("saves.llm")
    if saves is None or not saves["facts"]:
        return ["Saves of an LLM's shapes were not measured."]
    memory = {row["name"]: row["figures"] for row in tables.get("memory.llm", {"rows": []})["rows"]}
    facts = saves["facts"]
    about = (
        f"One rank, {facts['gb']:.2f} GB in {facts['tensors']:.0f} tensors, {document['machine']['cpus']} cores, a "
        f"disk of {facts['raw']:.2f} GB/s (raw, in the same run). Each round: the call, {facts['pause']:.1f} s of an "
        f"idle host, as if a GPU computed, `optimizer.step()`. Medians of {_most(saves)} (`make bench`, "
        f"{document['date'][:10]}):"
    )
    heads = ["writer", "stall of training", "until durable", "share of the disk's speed"]
    heads += ["CPU seconds per GB", "host memory"]
    lines = [about, "", *_rows(heads)]
    for row in saves["rows"]:
        if figures := row["figures"]:
            name = row["name"].replace("ours", "`dcp_datastates`", 1) if row["own"] else row["name"]
            peak = memory.get(row["name"], {}).get("peak")
            cells = (
                f"{number(figures['stall']['median'])} ms",
                f"{figures['durable']['median']:.2f} s",
                f"{figures['of_raw']['median']:.0f} %",
                f"{figures['cpu']['median']:.2f}",
                f"{number(peak['median'])} MiB" if peak else "",
            )
            lines.append(f"| {' | '.join([name, *cells])} |")
    return lines


def _most(table: dict[str, Any]) -> int:
    return max((len(row["samples"]) for row in table["rows"]), default=0)


def draw(document: dict[str, Any], path: Path) -> bool:
    """Bars of all that is compared with peers, in logarithms; False without matplotlib."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    panels = [
        (table, column)
        for table in document["tables"]
        if table["key"] != "failures"
        for column in table["columns"]
        if column["compared"] and any(column["key"] in row["figures"] for row in table["rows"])
    ]
    if not panels:
        return False
    height = -(-len(panels) // 3)
    figure, axes = plt.subplots(
        height, 3, figsize=(18, 4.2 * height), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (table, column) in zip(axes.flat, panels, strict=False):
        rows = [row for row in table["rows"] if column["key"] in row["figures"]][::-1]
        found = [row["figures"][column["key"]] for row in rows]
        medians = [each["median"] for each in found]
        spreads = [
            [each["median"] - each["low"] for each in found],
            [each["high"] - each["median"] for each in found],
        ]
        colors = ["C0" if row["own"] else "C7" for row in rows]
        names = [row["name"].replace("`", "") for row in rows]
        axis.barh(names, medians, xerr=spreads, color=colors)
        axis.set_xscale("log")
        axis.set_title(f"{table['title']}\n{column['heading']}, {column['unit']}", fontsize=9)
        axis.tick_params(labelsize=7)
    figure.savefig(path, dpi=80)
    plt.close(figure)
    return True
