"""Jobs that meet at one path: they save over one another there, or load from it meanwhile. Bodies for ranks."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dcp_datastates import CheckpointReplacedError
from support.crashes.mounts import private_tmpfs
from support.crashes.residue import entries
from support.jobs.processes import Ended, run_ranks
from support.jobs.server import fork_server
from support.state.checkpoints import assert_same, causes, load, zeros
from support.state.saving import (
    Report,
    checkpoint,
    number_at,
    part,
    report_of,
    save_over,
)

__all__ = ["ELEMENTS", "Loads", "begin_job", "publications", "values", "whole_at"]

ELEMENTS = 5_000
RESULT_SECONDS = 60.0

_jobs = ThreadPoolExecutor()


def begin_job(function: str, world: int, scratch: Path, **arguments: Any) -> Future[list[Ended]]:
    """:func:`run_ranks`, behind the test."""
    fork_server()  # by one thread
    return _jobs.submit(
        run_ranks, f"support.crashes.contending:{function}", world, scratch, **arguments
    )


def publications(trace: Path) -> int:
    """How many times the process with this trace has committed."""
    records = map(json.loads, trace.read_text().splitlines())
    return sum(record["op"] == "told" for record in records)


def _go_on(still: bool) -> bool:
    """Rank 0's answer, on every rank."""
    answer = [still]
    dist.broadcast_object_list(answer, 0)
    return answer[0]


# --- saving -------------------------------------------------------------------------------------------


def save_in_a_loop(path: str, first: int, lasting: float) -> list[Report]:
    """Save ``first``, ``first + 1``, … over whatever is there, and load after each."""
    reports = []
    deadline = time.monotonic() + lasting
    while _go_on(time.monotonic() < deadline):
        future = save_over(
            part(first + len(reports), ELEMENTS), path, read_window="immediate", commit_timeout=20
        )
        reports.append(report_of(future, RESULT_SECONDS))
        if reports[-1].committed:
            assert whole_at(path) is not None
    return reports


def whole_at(path: Path | str) -> int | None:
    """:func:`number_at`, again if it was replaced meanwhile."""
    while True:
        try:
            return number_at(Path(path), dist.get_world_size(), ELEMENTS)
        except BaseException as error:
            if not all(isinstance(cause, CheckpointReplacedError) for cause in causes(error)):
                raise


def save_once(path: str, number: int, pids: str, commit_timeout: float) -> Report:
    """Save; ``pids`` is where this rank notes its process."""
    Path(pids, str(dist.get_rank())).write_text(str(os.getpid()))
    future = save_over(
        part(number, ELEMENTS), path, read_window="immediate", commit_timeout=commit_timeout
    )
    return report_of(future, RESULT_SECONDS)


def save_unshared(path: str, elsewhere: int, commits_there: bool) -> tuple[Report | None, str]:
    """Save where one rank sees another directory under the same name; why that could not be arranged."""
    mine = dist.get_rank() == elsewhere
    whys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(whys, private_tmpfs(Path(path).parent) if mine else "")
    if any(whys):
        return None, "".join(whys)
    if mine and commits_there:
        Path(path).mkdir()
        Path(path, ".metadata").write_bytes(b"what is there is not ours to touch")
    future = save_over(part(2, ELEMENTS), path, read_window="immediate")
    report = report_of(future, RESULT_SECONDS)
    expected = [".metadata"] if mine and commits_there else []
    deadline = time.monotonic() + 20
    while left := [name for name in entries(Path(path)) if name not in expected]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    dist.barrier()
    return report, ""


# --- loading ------------------------------------------------------------------------------------------


@dataclass
class Loads:
    """What a reader saw."""

    whole: list[int] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


def load_in_a_loop(path: str, until: str, saved_by: int) -> Loads:
    """``dcp.load`` by all ranks together, until the file ``until`` is there; each load is whole or raises."""
    logging.disable(logging.WARNING)
    loads = Loads()
    while _go_on(not Path(until).exists()):
        template = zeros(checkpoint(0, saved_by, ELEMENTS))
        template["object"] = {"number": -1, "text": ""}
        try:
            load(template, path)
        except BaseException as error:
            for cause in causes(error):
                loads.errors[type(cause).__name__] += 1
            continue
        number = template["object"]["number"]
        assert_same(template, checkpoint(number, saved_by, ELEMENTS))
        numbers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(numbers, number)
        assert len(set(numbers)) == 1, f"the ranks loaded different checkpoints: {numbers}"
        loads.whole.append(number)
    return loads


def values(ended: Sequence[Ended]) -> list[Any]:
    """What each rank returned."""
    return [one.result() for one in ended]
