"""Several at one path: saves in flight, jobs, a job that was stopped for long, readers. Never a blend."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist
from support.crashes.contending import ELEMENTS, begin_job, publications, values, whole_at
from support.crashes.faults import assert_tidy
from support.crashes.residue import Residue, assert_nothing_left
from support.jobs.groups import own_group
from support.jobs.processes import run_ranks
from support.jobs.ranks import ranks
from support.jobs.stopping import await_fired
from support.state.checkpoints import async_save
from support.state.saving import part, save_over
from support.tiers import sampled

OLD, STALLED, SUCCESSOR, NEXT = 1, 2, 3, 4

# --- one job ------------------------------------------------------------------------------------------


@ranks(3)
@pytest.mark.parametrize("by_dcp", [False, True])
def test_saves_in_flight_to_one_path_commit_in_their_order(by_dcp, shared_dir):
    """Each by a writer of its own; what loads meanwhile is one of them, and never older than before."""
    path = shared_dir / "c"
    group = own_group() if by_dcp else None

    def begin(number):
        state = part(number, ELEMENTS)
        if by_dcp:
            return async_save(state, path, group=group, read_window="immediate")
        return save_over(state, path, read_window="immediate")

    begin(1).result(60)
    assert whole_at(path) == 1
    dist.barrier()
    before = Residue.now()
    futures, seen = [], [1]
    for number in range(2, 10):
        futures.append(begin(number))
        seen.append(whole_at(path))
    for future in futures:
        future.result(60)
    while seen[-1] != 9:
        seen.append(whole_at(path))
    assert seen == sorted(seen)
    dist.barrier()
    assert_tidy(path, 3)
    del futures, future
    assert_nothing_left(before, "after saves in flight")


# --- two jobs -----------------------------------------------------------------------------------------


def test_two_jobs_that_save_over_one_another(tmp_path):
    path, until = tmp_path / "c", tmp_path / "until"
    traces = [tmp_path / f"trace{job}" for job in range(2)]
    _commit(path, OLD, tmp_path)
    reader = begin_job("load_in_a_loop", 1, tmp_path, path=str(path), until=str(until), saved_by=2)
    jobs = [
        begin_job(
            "save_in_a_loop",
            2,
            tmp_path,
            environments=[{"DCP_DATASTATES_TRACE": str(trace)}, {}],
            seconds=120,
            path=str(path),
            first=first,
            lasting=6.0,
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
    assert min(map(len, (both[0][0], both[1][0]))) >= 3
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
        seconds=90,
        path=str(path),
        number=number,
        pids=str(pids),
        commit_timeout=commit_timeout,
    )


def _number(path, scratch):
    (loader,) = run_ranks(
        "support.state.saving:number_found", 1, scratch, path=str(path), world=2, elements=ELEMENTS
    )
    return loader.result()


def _stall(path, point, scratch):
    """A job whose coordinator stops at ``point``; the job, and the coordinator's process."""
    log = scratch / "fired"
    stopping = {
        "DCP_DATASTATES_FAILPOINTS": f"{point}=stop",
        "DCP_DATASTATES_FAILPOINTS_LOG": str(log),
    }
    job = _save(path, STALLED, scratch, environments=[stopping, {}])
    await_fired(log, point)
    return job, int((scratch / f"pids{STALLED}" / "0").read_text())


def test_a_job_that_wakes_after_its_successor_committed_does_not_overwrite(tmp_path):
    path = tmp_path / "c"
    _commit(path, OLD, tmp_path)
    job, pid = _stall(path, "publish.decide.before", tmp_path)
    _commit(path, SUCCESSOR, tmp_path)
    os.kill(pid, signal.SIGCONT)
    coordinator, other = values(job.result())
    assert coordinator.kind == "CheckpointSupersededError", coordinator
    assert other.kind in ("CheckpointSupersededError", "CommitOutcomeUnknown"), other
    assert _number(path, tmp_path) == SUCCESSOR
    assert_tidy(path, 2)


@pytest.mark.parametrize(
    ("point", "awakes"),
    sampled(
        [
            ("publish.decide.after", False),
            ("publish.link.before", False),
            ("publish.link.before", True),
        ],
        keep=[("publish.decide.after", False), ("publish.link.before", True)],
    ),
)
def test_a_job_that_is_stopped_while_it_publishes_does_not_keep_its_successor_out(
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


@pytest.mark.parametrize("readers", sampled([1, 2], keep=[2]))
def test_what_is_loaded_during_many_overwrites_is_whole(readers, tmp_path):
    path, until = tmp_path / "c", tmp_path / "until"
    _commit(path, OLD, tmp_path)
    reader = begin_job(
        "load_in_a_loop",
        readers,
        tmp_path,
        seconds=90,
        path=str(path),
        until=str(until),
        saved_by=2,
    )
    reports = values(
        begin_job(
            "save_in_a_loop", 2, tmp_path, seconds=90, path=str(path), first=2, lasting=5.0
        ).result()
    )
    until.touch()
    assert all(report.committed for one in reports for report in one)
    for loads in values(reader.result()):
        assert loads.whole == sorted(loads.whole), "an older checkpoint came back"
        assert len(set(loads.whole)) >= 3, "the reader met too few of them"
        assert set(loads.errors) <= {"CheckpointReplacedError"}, loads.errors


# --- a directory that is not shared -------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", [0, 1])
def test_a_directory_that_the_ranks_do_not_share_is_named(elsewhere, tmp_path):
    """One rank has another file system mounted there, and a checkpoint of its own on it."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    outcomes = values(
        run_ranks(
            "support.crashes.contending:save_unshared",
            2,
            tmp_path,
            path=str(mounted / "c"),
            elsewhere=elsewhere,
            commits_there=elsewhere == 1,
        )
    )
    for report, why in outcomes:
        if report is None:
            pytest.skip(f"no file system of one's own here: {why}")
        assert report.kind == "ConfigurationError", report
        assert "rank 1" in report.text
        assert "does not see" in report.text
        assert str(mounted / "c") in report.text
