"""Several at one path: saves in flight, jobs, a job that was stopped for long, readers. Never a blend."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.crashes.failing import await_fired, variables
from support.crashes.faults import assert_tidy
from support.jobs.groups import gathered
from support.jobs.processes import Ended, run_ranks
from support.jobs.server import fork_server
from support.state.checkpoints import assert_same, causes, load, zeros
from support.state.saving import Report, checkpoint, number_at, part, report_of, save_over
from support.stores.server import BUCKET, strict_endpoint
from support.stores.server import variables as variables_of_server
from support.tiers import sampled, tries

import dcp_datastates
from dcp_datastates.errors import CheckpointReplacedError

OLD, STALLED, SUCCESSOR, NEXT = 1, 2, 3, 4

ELEMENTS = 5_000
RESULT_SECONDS = 60.0

_jobs = ThreadPoolExecutor()


def begin_job(function: str, world: int, scratch: Path, **arguments: Any) -> Future[list[Ended]]:
    """:func:`run_ranks`, in the background."""
    fork_server()  # by one thread
    return _jobs.submit(run_ranks, f"{__name__}:{function}", world, scratch, **arguments)


def publications(trace: Path) -> int:
    """How many times the process with this trace has committed."""
    records = map(json.loads, trace.read_text().splitlines())
    return sum(record["op"] == "told" for record in records)


def _go_on(still: object) -> bool:
    """Rank 0's answer, on every rank."""
    answer = [bool(still)]
    dist.broadcast_object_list(answer, 0)
    return answer[0]


# --- saving -------------------------------------------------------------------------------------------


def save_in_a_loop(path: str, first: int, least: int, met: str = "") -> list[Report]:
    """Save ``first``, ``first + 1``, … over whatever is there, and load after each: ``least`` times, and until there is
    the file ``met``: a save has failed in one of these jobs, or a reader has seen three.
    """
    reports: list[Report] = []
    deadline = time.monotonic() + 100
    while _go_on(
        len(reports) < least or (met and not Path(met).exists() and time.monotonic() < deadline)
    ):
        future = save_over(
            part(first + len(reports), ELEMENTS), path, reads="immediate", commit_timeout=20
        )
        reports.append(report_of(future, RESULT_SECONDS))
        if reports[-1].committed:
            assert whole_at(path) is not None
        elif met:
            Path(met).touch()
    return reports


def whole_at(path: Path | str) -> int | None:
    """:func:`number_at`, again if it was replaced meanwhile."""
    while True:
        try:
            return number_at(path, dist.get_world_size(), ELEMENTS)
        except BaseException as error:
            if not all(isinstance(cause, CheckpointReplacedError) for cause in causes(error)):
                raise


def save_once(path: str, number: int, pids: str, commit_timeout: float) -> Report:
    """Save; ``pids`` is where this rank notes its process."""
    Path(pids, str(dist.get_rank())).write_text(str(os.getpid()))
    future = save_over(
        part(number, ELEMENTS), path, reads="immediate", commit_timeout=commit_timeout
    )
    return report_of(future, RESULT_SECONDS)


# --- loading ------------------------------------------------------------------------------------------


@dataclass
class Loads:
    """What a reader saw."""

    whole: list[int] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


LOADS: dict[str, Callable[[str, dict[str, Any]], dict[str, Any]]] = {
    "dcp.load": lambda path, state: load(state, path),
    "load": lambda path, state: dcp_datastates.load(path, state),
    "load, no state": lambda path, _: dcp_datastates.load(path),
}


def load_in_a_loop(path: str, until: str, saved_by: int, met: str = "") -> Loads:
    """Load in each way in turn, all ranks together, until the file ``until`` is there; each load is whole or raises.
    The file ``met`` says that each rank has seen three checkpoints.
    """
    logging.disable(logging.WARNING)
    loads = Loads()
    ways = itertools.cycle(LOADS)
    while _go_on(not Path(until).exists()):
        how = next(ways)
        template = zeros(checkpoint(0, saved_by, ELEMENTS))
        template["object"] = {"number": -1, "text": ""}
        number = None
        try:
            found = LOADS[how](path, template)
        except BaseException as error:
            for cause in causes(error):
                loads.errors[type(cause).__name__] += 1
        else:
            number = found["object"]["number"]
            assert_same(found, checkpoint(number, saved_by, ELEMENTS))
            loads.whole.append(number)
        numbers = gathered(number)
        together = how != "load, no state"
        assert not together or len(set(numbers)) == 1, f"the ranks differ: {numbers}"
        if met and min(gathered(len(set(loads.whole)))) >= 3:
            Path(met).touch()
    return loads


def values(ended: Sequence[Ended]) -> list[Any]:
    """What each rank returned."""
    return [one.result() for one in ended]


# --- two jobs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("saves", tries(8, 40))
def test_two_jobs_that_save_over_one_another(saves, tmp_path):
    path, until = tmp_path / "c", tmp_path / "until"
    traces = [tmp_path / f"trace{job}" for job in range(2)]
    _commit(path, OLD, tmp_path)
    reader = begin_job(
        "load_in_a_loop", 1, tmp_path, seconds=250, path=str(path), until=str(until), saved_by=2
    )
    jobs = [
        begin_job(
            "save_in_a_loop",
            2,
            tmp_path,
            environments=[{"DCP_DATASTATES_TRACE": str(trace)}, {}],
            seconds=200,
            path=str(path),
            first=first,
            least=saves,
            met=str(tmp_path / "met"),
        )
        for first, trace in zip((101, 5001), traces, strict=True)
    ]
    both = [values(job.result()) for job in jobs]
    until.touch()
    (loads,) = values(reader.result())
    committed = []
    for first, reports, trace in zip((101, 5001), both, traces, strict=True):
        of_coordinator, of_other = reports
        assert [one.committed for one in of_coordinator] == [one.committed for one in of_other]
        numbers = [first + n for n, one in enumerate(of_coordinator) if one.committed]
        assert publications(trace) == len(numbers), "told of other commits than there were"
        committed += numbers
        for report in of_coordinator + of_other:
            assert report.committed or report.kind in (
                "CheckpointSupersededError",
                "StorageError",
            ), report
    assert any(not report.committed for job in both for report in job[0]), "they never met"
    assert set(loads.whole) <= {OLD, *committed}
    assert set(loads.errors) <= {"CheckpointReplacedError"}
    assert _number(path, tmp_path) in committed
    _commit(path, NEXT, tmp_path)
    assert_tidy(path, 2)


def _commit(path, number, scratch, **options):
    """A job that saves, and commits."""
    reports = _save(path, number, scratch, **options).result()
    assert all(report.committed for report in values(reports)), reports


def _save(path, number, scratch, commit_timeout=60.0, environments=()):
    pids = scratch / f"pids{number}"
    pids.mkdir(exist_ok=True)
    return begin_job(
        "save_once",
        2,
        scratch,
        environments=environments,
        seconds=200,
        path=str(path),
        number=number,
        pids=str(pids),
        commit_timeout=commit_timeout,
    )


def _number(path, scratch):
    (loader,) = run_ranks(
        "support.state.saving:number_at", 1, scratch, path=str(path), world=2, elements=ELEMENTS
    )
    return loader.result()


def _stall(path, point, scratch):
    """A job whose coordinator stops at ``point``; the job, and the coordinator's process."""
    log = scratch / "fired"
    stopping = variables(f"{point}=stop", log)
    job = _save(path, STALLED, scratch, environments=[stopping, {}])
    await_fired(log, point)
    return job, int((scratch / f"pids{STALLED}" / "0").read_text())


@pytest.mark.parametrize(
    ("point", "awakes"),
    sampled(
        [
            ("publish.decide.before", True),
            ("publish.decide.after", False),
            ("publish.link.before", False),
            ("publish.link.before", True),
        ],
        keep=[("publish.decide.after", False), ("publish.link.before", True)],
    ),
)
def test_a_job_that_is_stopped_while_it_publishes_neither_keeps_its_successor_out_nor_overwrites_it(
    point, awakes, tmp_path
):
    path = tmp_path / "c"
    _commit(path, OLD, tmp_path)
    job, pid = _stall(path, point, tmp_path)
    _commit(path, SUCCESSOR, tmp_path)
    assert _number(path, tmp_path) == SUCCESSOR
    os.kill(pid, signal.SIGCONT if awakes else signal.SIGKILL)
    ended = job.result()
    if awakes:
        assert ended[0].result().kind == "CheckpointSupersededError"
    else:
        assert ended[0].killed
    assert not ended[1].result().committed
    assert _number(path, tmp_path) == SUCCESSOR
    _commit(path, NEXT, tmp_path)
    assert _number(path, tmp_path) == NEXT
    assert_tidy(path, 2)


# --- readers ------------------------------------------------------------------------------------------


@pytest.mark.timeout(660)
@pytest.mark.parametrize(
    ("place", "readers", "saves"),
    sampled(
        [("directory", 2, 25), ("store", 1, 10), ("directory", 1, 200), ("store", 2, 200)],
        keep=lambda case: case[2] < 200,
    ),
)
def test_what_is_loaded_during_many_overwrites_is_whole(place, readers, saves, tmp_path):
    path, until, met = str(tmp_path / "c"), tmp_path / "until", str(tmp_path / "met")
    environment = {}
    if place == "store":
        path = f"s3://{BUCKET}/{tmp_path.parent.name}/{tmp_path.name}"
        environment = variables_of_server(strict_endpoint())
    _commit(path, OLD, tmp_path, environments=[environment] * 2)
    reader = begin_job(
        "load_in_a_loop",
        readers,
        tmp_path,
        environments=[environment] * readers,
        seconds=600,
        path=path,
        until=str(until),
        saved_by=2,
        met=met,
    )
    saver = begin_job(
        "save_in_a_loop",
        2,
        tmp_path,
        environments=[environment] * 2,
        seconds=600,
        path=path,
        first=2,
        least=saves,
        met=met,
    )
    reports = values(saver.result())
    until.touch()
    assert all(report.committed for one in reports for report in one)
    for loads in values(reader.result()):
        assert loads.whole == sorted(loads.whole), "an older checkpoint came back"
        assert len(set(loads.whole)) >= 3, "the reader met too few of them"
        assert set(loads.errors) <= {"CheckpointReplacedError"}, loads.errors
