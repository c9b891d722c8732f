"""``dcp-datastates trace``: the timeline of a checkpoint's save over its ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median

from dcp_datastates.monitoring.trace import chrome_trace, trace_of
from dcp_datastates.results import SaveRecord
from dcp_datastates.text import columns, count, duration, size
from dcp_datastates_cli.output import OK, answer


def run(options: argparse.Namespace) -> int:
    """Say what the save of the checkpoint at ``options.path`` cost; returns the exit status."""
    records = trace_of(options.path)
    answer(options, chrome_trace(records), "\n".join(_summary(records)))
    return OK


def _summary(records: Sequence[SaveRecord]) -> list[str]:
    written = sum(record.written_bytes for record in records)
    ended = max(record.began_at + record.seconds for record in records)
    whole = ended - min(record.began_at for record in records)
    rows = [
        _row(phase, [record.phases[phase] for record in records]) for phase in records[0].phases
    ]
    rows.append(_row("stall of training", [record.stall_seconds for record in records]))
    return [
        f"{records[0].path}: {count(len(records), 'rank')}, {size(written)}, {duration(whole)} until its publication",
        *columns(("phase", "median>", "slowest>", "its rank>"), rows),
    ]


def _row(name: str, seconds: Sequence[float]) -> tuple[str, str, str, int]:
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return name, duration(median(seconds)), duration(seconds[slowest]), slowest
