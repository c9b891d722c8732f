"""A fault strikes one rank at every step of a load: the others name it, know what they have, and load again."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.crashes.cells import LIMIT_SECONDS
from support.crashes.failing import armed, await_fired, fired, go_on, silence, stop
from support.jobs.groups import gathered
from support.jobs.processes import run_ranks
from support.state.checkpoints import assert_same, zeros
from support.state.saving import Report, checkpoint, report_of, save_over
from support.stores.proxy import Proxy, answered
from support.stores.server import BUCKET, strict_endpoint, variables
from support.tiers import sampled
from support.waiting import await_that

from dcp_datastates import load
from dcp_datastates.commit.group import commit_group
from dcp_datastates.ranks.rank_set import rank_set_of

WORLD, ELEMENTS, NUMBER = 3, 20_000, 1
FIRST, LAST = 0, WORLD - 1

STEPS = [f"load.{step}.before" for step in ("open", "fit", "objects", "read")]
POINTS = [*STEPS, *(step.replace("before", "after") for step in STEPS)]
ENGINES = ["restore.open.before", "restore.read.before", "restore.read.after"]
"""The engine opens no file of a store."""
REFUSALS = {"AccessDenied": 403, "NoSuchKey": 404}
"""What the store answers to one read of data."""

CELLS = [
    *itertools.product(["directory", "store"], POINTS, ["kill", "error:EIO"], [FIRST, LAST]),
    *itertools.product(["directory"], ENGINES, ["kill", "error:EIO"], [FIRST, LAST]),
    *itertools.product(["store"], REFUSALS, ["refused"], [FIRST, LAST]),
    # The others learn of a stop at the job's store, wherever the checkpoint is.
    *itertools.product(["directory"], STEPS, ["stop"], [LAST]),
    *itertools.product(["store"], STEPS, ["stop"], [FIRST]),
]
SAMPLE = [
    ("directory", "load.open.before", "kill", FIRST),
    ("directory", "load.fit.after", "kill", LAST),
    ("directory", "load.objects.before", "error:EIO", LAST),
    ("directory", "load.read.before", "kill", LAST),
    ("directory", "restore.read.before", "error:EIO", LAST),
    ("store", "load.read.after", "kill", FIRST),
    ("store", "NoSuchKey", "refused", LAST),
]


# --- on a rank ------------------------------------------------------------------------------------------


def load_twice(path: str, victim: int, point: str, fault: str, scratch: str) -> tuple[Report, bool]:
    """Load with the fault, and again without, on all ranks or those that are left. Returns what came of the first, and
    whether it had read.
    """
    rank, others = dist.get_rank(), [rank for rank in range(WORLD) if rank != victim]
    left = dist.new_group(others if fault == "kill" else None, backend="gloo")
    pids = gathered(os.getpid())
    with_objects = point in POINTS  # else the first read is one of objects, and has changed nothing
    save_over(_state(with_objects), path, reads="immediate").result(60)
    _await_beats()
    log, stops = Path(scratch, "fired"), fault == "stop" and rank == others[0]
    entry = f"{point}={'sleep:12' if fault == 'stop' else fault}"
    strikes = rank == victim and fault != "refused"
    failing = armed(entry, natively=point in ENGINES, log=log) if strikes else nullcontext()
    sharing = False if fault == "refused" else None  # else the others would read for it
    found = _empty(with_objects)
    with failing, silence(8 if fault == "stop" else 20), ThreadPoolExecutor(1) as thread:
        loading = thread.submit(load, path, found, share_reads=sharing)
        if stops:
            await_fired(log, point)
            stop(pids[victim])
        report = report_of(loading, LIMIT_SECONDS + 5)
        Path(scratch, f"told{rank}").touch()
        if stops:
            await_that(lambda: all(Path(scratch, f"told{other}").exists() for other in others))
            go_on(pids[victim])
    again = load(path, _empty(with_objects), process_group=left)
    assert_same(again, _state(with_objects))
    return report, bool(found["shared"].any())


def _await_beats() -> None:
    """Of a rank that is lost before it has beaten, the others only see that it does not come."""
    detector = commit_group(rank_set_of(None)).detector
    assert detector is not None
    is_first = dist.get_rank() == FIRST
    await_that(lambda: not detector.absent(1, True) if is_first else detector.said_by_coordinator)
    dist.barrier()


def _state(with_objects: bool) -> dict[str, Any]:
    """Each rank has a name of its own, too."""
    names = [*(["object"] if with_objects else []), "shared", f"weight{dist.get_rank()}"]
    return {name: checkpoint(NUMBER, WORLD, ELEMENTS)[name] for name in names}


def _empty(with_objects: bool) -> dict[str, Any]:
    objects = {"object": {"number": 0, "text": ""}} if with_objects else {}
    return {**zeros(_state(with_objects)), **objects}


# --- the test -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "point", "fault", "victim"), sampled(CELLS, SAMPLE))
def test_a_fault_strikes_one_rank(
    place: str, point: str, fault: str, victim: int, tmp_path: Path
) -> None:
    in_store = f"s3://{BUCKET}/{tmp_path.parent.name}/{tmp_path.name}"
    environments = [variables(strict_endpoint())] * WORLD
    if fault == "refused":
        between = Proxy(strict_endpoint())
        refused = between.inject(answered(REFUSALS[point], point), "GET", r"\.safetensors")
        environments[victim] = variables(between.url)
    ended = run_ranks(
        f"{__name__}:load_twice",
        WORLD,
        tmp_path,
        environments=environments,
        path=in_store if place == "store" else str(tmp_path / "checkpoint"),
        victim=victim,
        point=point,
        fault=fault,
        scratch=str(tmp_path),
    )
    told = {one.rank: one.result() for one in ended if not one.killed}
    struck = refused.seen if fault == "refused" else fired(tmp_path / "fired")
    assert struck, "the fault never came, so this shows nothing"
    assert ended[victim].killed == (fault == "kill")
    may_have_read = not point.startswith(("load.open", "load.fit", "load.objects"))
    for rank, (report, has_read) in told.items():
        assert report.ours, f"it has loaded, or the error is none of this package: {report.text}"
        assert f"rank {victim}" in report.text, f"rank {victim} is not named: {report.text}"
        assert ("half loaded" in report.text) == may_have_read, report.text
        assert ("OSError" in report.text) == (point in POINTS and fault == "error:EIO")
        assert rank == victim or has_read == may_have_read
        assert fault != "kill" or report.at - ended[victim].ended_at < LIMIT_SECONDS
