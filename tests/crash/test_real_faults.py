"""A fault on one rank fails that save on every rank, and nothing else; no rank hangs, and nothing leaks.

What holds after each fault is in ``support/crashes/faults.py``; here are the faults, with their real causes where there
is a way.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.crashes.cells import POINTS
from support.crashes.failing import armed_on, await_fired, go_on, held, silence, stop
from support.crashes.faults import fault_between_saves
from support.crashes.mounts import bind_permissions, fill, remount, tmpfs
from support.jobs.groups import gathered
from support.jobs.processes import run_ranks
from support.jobs.ranks import ranks
from support.state.checkpoints import committed
from support.state.saving import save_over
from support.tiers import sampled
from support.waiting import await_that

from dcp_datastates.errors import StorageError

IO_ERROR = "Input/output error"
NATIVE = ("read", "flush", "sync")
CREATED = ("publish.link.after", "publish.decide.after")
"""The new checkpoint is there, whatever storage says."""
UNSYNCED = "publish.sync_directory"
"""It is there, and may be gone again after a crash."""


def _cells(*prefixes):
    return [
        pytest.param(point.name, kind, id=f"{point.name}-{kind}")
        for point in POINTS
        if point.name.startswith(prefixes)
        for kind in point.kinds
    ]


def _all_failed(everyone):
    assert None not in everyone
    assert not any(error.unknown for told in everyone for error in told), everyone


# --- an error where the system is called --------------------------------------------------------------


EACH_CALL = (
    *("read.before-coordinator", "flush.open.before-other"),
    *("flush.write.after-coordinator", "sync.directory.before-other"),
)


def _assert_told(point, kind, shared_dir, natively, plainly):
    """All ranks fail with the error and the rank; ``plainly``: by DCP's own calls."""
    victim = 0 if kind == "coordinator" else 1
    fault = armed_on(victim, f"{point}=error:EIO", shared_dir / "fired", natively=natively)
    words = (f"rank {victim}" if plainly else f"rank {victim} of 2", IO_ERROR)
    _all_failed(fault_between_saves(shared_dir / "c", fault, *words, plainly=plainly))


@ranks(2)
@pytest.mark.parametrize(("point", "kind"), sampled(_cells(*NATIVE), EACH_CALL))
def test_an_error_in_the_engine(point, kind, shared_dir):
    _assert_told(point, kind, shared_dir, natively=True, plainly=False)


TOLD_BY_DCP = (
    *("read.before-coordinator", "read.before-other", "flush.write.after-coordinator"),
    *("flush.write.after-other", "sync.data.before-coordinator", "sync.data.before-other"),
    *("plan.mkdir.before-coordinator", "publish.create.after-coordinator"),
    "plan.after-coordinator",
)


@ranks(2)
@pytest.mark.parametrize(
    ("point", "kind"),
    sampled(
        [each for each in _cells("") if each.id in TOLD_BY_DCP],
        keep=["sync.data.before-coordinator", "plan.after-coordinator"],
    ),
)
def test_an_error_is_told_by_dcp(point, kind, shared_dir):
    _assert_told(point, kind, shared_dir, natively=point.startswith(NATIVE), plainly=True)


EACH_STEP = (
    *("stage.before-other", "plan.mkdir.before-coordinator", "publish.write.after-coordinator"),
    *("publish.link.before-coordinator", "publish.link.after-coordinator"),
    "publish.sync_directory.before-coordinator",
)


@ranks(2)
@pytest.mark.parametrize(("point", "kind"), sampled(_cells("publish", "plan", "stage"), EACH_STEP))
def test_an_error_of_planning_or_publication(point, kind, shared_dir):
    victim = 0 if kind == "coordinator" else 1
    fault = armed_on(victim, f"{point}=error:EIO", shared_dir / "fired")
    everyone = fault_between_saves(shared_dir / "c", fault, f"rank {victim} of 2", IO_ERROR)
    if point in CREATED:
        assert everyone == [None, None]
    elif point.startswith((UNSYNCED, "publish.link.before")):
        assert all(told and told[0].unknown for told in everyone), everyone
    else:
        _all_failed(everyone)


@ranks(3)
@pytest.mark.parametrize(
    ("point", "kind"),
    sampled(
        _cells("vote", "outcome"),
        keep=["vote.before-other", "vote.after-other", "outcome.before-coordinator"],
    ),
)
def test_an_error_between_vote_and_outcome(point, kind, shared_dir):
    """Whatever it comes to, no rank is told what is not so; and one that has voted can see it at the path."""
    victim = 0 if kind == "coordinator" else 2
    fault = armed_on(victim, f"{point}=error:EIO", shared_dir / "fired")
    everyone = fault_between_saves(shared_dir / "c", fault)
    if kind == "other":
        assert not any(error.unknown for told in everyone for error in told or ()), everyone
    if (point, kind) == ("vote.before", "other"):
        _all_failed(everyone)


@ranks(2)
@pytest.mark.parametrize("point", ["cleanup.link.before", "cleanup.unlink.before"])
def test_an_error_after_the_publication_does_not_make_it_a_failure(point, shared_dir):
    """Else the files of the checkpoint that is there would be removed."""
    fault = armed_on(0, f"{point}=error:EIO", shared_dir / "fired")
    assert fault_between_saves(shared_dir / "c", fault) == [None, None]


# --- a file system that is full, or read-only ---------------------------------------------------------


@contextlib.contextmanager
def _full(small, leaving):
    """The file system is full but for ``leaving()`` bytes. Collective."""
    dist.barrier()
    if dist.get_rank() == 0:
        filler = fill(small, leaving())
    dist.barrier()
    yield
    if dist.get_rank() == 0:
        filler.unlink()


@ranks(4)
@pytest.mark.parametrize("plainly", sampled([False, True], keep=[False]))
def test_a_file_system_without_room_for_the_data(plainly, shared_dir):
    """Some of the four files fit, and some do not."""
    with tmpfs(shared_dir / "small", "16m") as small:
        _all_failed(
            fault_between_saves(
                small / "c",
                _full(small, lambda: 4096 * 40),
                "rank ",
                "No space left on device",
                "were to be written",
                plainly=plainly,
            )
        )


@ranks(1)
def test_a_full_file_system_is_told_with_what_was_needed_and_what_is_free(shared_dir):
    with tmpfs(shared_dir / "small", "8m") as small:
        with pytest.raises(StorageError) as caught:
            save_over({"w": torch.ones(3 << 20)}, small / "c").result(60)
        error = caught.value
        assert error.errno == errno.ENOSPC
        assert str(error).count(str(small)) == 1, f"the path more than once: {error}"
        words = str(error).replace(error.filename, "")  # an attempt's name may have any digits
        assert words.count("28") == 1, f"the number more than once: {error}"
        assert "12.00 MiB were to be written, and 8.00 MiB are free" in str(error)


@ranks(1)
@pytest.mark.parametrize("below", ["", "c"])
def test_a_read_only_file_system_is_told_as_such(below, shared_dir):
    with tmpfs(shared_dir / "small", "8m") as small:
        remount(small, "ro")
        with pytest.raises(StorageError, match="read-only file system") as caught:
            save_over({"w": torch.ones(3)}, small / below)
        assert caught.value.errno == errno.EROFS


@ranks(2)
def test_a_file_system_with_room_for_the_data_and_not_for_the_metadata(shared_dir):
    with tmpfs(shared_dir / "small", "16m") as small:

        def data():
            files = (small / "c").rglob("*.safetensors")
            return sum(-(-file.stat().st_size // 4096) * 4096 for file in files)

        _all_failed(
            fault_between_saves(
                small / "c",
                _full(small, data),
                "rank 0 of 2",
                "decision",
                "No space left on device",
            )
        )


@ranks(2)
@pytest.mark.parametrize("victim", sampled([0, 1], keep=[1]))
def test_a_file_that_may_not_grow_so_large(victim, shared_dir):
    """RLIMIT_FSIZE: the system's own refusal at fallocate(2), which needs no file system of its own."""

    @contextlib.contextmanager
    def limited():
        if dist.get_rank() != victim:
            yield
            return
        former = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, former[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, former)

    _all_failed(
        fault_between_saves(
            shared_dir / "c", limited(), f"rank {victim} of 2", "File too large", elements=3 << 17
        )
    )


@ranks(2)
@pytest.mark.parametrize("plainly", sampled([False, True], keep=[True]))
def test_a_file_system_that_becomes_read_only_before_the_publication(plainly, shared_dir):
    with tmpfs(shared_dir / "small", "16m") as small:
        publication = []

        @contextlib.contextmanager
        def read_only():
            with held("publish.decide.before", 0) as point:
                publication.append(point)
                yield
            if dist.get_rank() == 0:
                remount(small, "rw")
            dist.barrier()

        def during():
            if dist.get_rank() == 0:
                assert publication[0].reached.wait(60)
                remount(small, "ro")
                publication[0].go_on.set()

        _all_failed(
            fault_between_saves(
                small / "c",
                read_only(),
                "rank 0",
                "Read-only file system",
                during=during,
                plainly=plainly,
            )
        )


def save_where_one_may_not_write(path, victim):
    """On a rank."""
    if dist.get_rank() == victim:
        bind_permissions()

    @contextlib.contextmanager
    def read_only():
        dist.barrier()
        if dist.get_rank() == 0:
            Path(path).chmod(0o555)
        dist.barrier()
        try:
            yield
        finally:
            dist.barrier()
            Path(path).chmod(0o755)

    everyone = fault_between_saves(
        Path(path), read_only(), f"rank {victim} of 2", "no permission to create"
    )
    _all_failed(everyone)


@pytest.mark.parametrize("victim", sampled([0, 1], keep=[1]))
def test_a_directory_that_one_rank_may_not_write(victim, tmp_path):
    """The same directory with other permissions, or another user: the other ranks must not wait for it."""
    for one in run_ranks(
        "crash.test_real_faults:save_where_one_may_not_write",
        2,
        tmp_path,
        path=str(tmp_path / "c"),
        victim=victim,
    ):
        one.result()


# --- a rank that is late ------------------------------------------------------------------------------


@ranks(3)
@pytest.mark.parametrize(
    ("point", "victim"),
    sampled(
        itertools.product(["flush.write.before", "vote.before"], [0, 2]),
        keep=[("flush.write.before", 2), ("vote.before", 0)],
    ),
)
def test_a_rank_that_stalls_past_the_commit_timeout(point, victim, shared_dir):
    natively = point.startswith(NATIVE)
    fault = armed_on(victim, f"{point}=sleep:9", shared_dir / "fired", natively=natively)
    everyone = fault_between_saves(
        shared_dir / "c", fault, f"rank {victim}", "no progress", commit_timeout=4
    )
    _all_failed(everyone)
    assert all(error.kind == "RankLostError" for told in everyone for error in told)


@ranks(3)
@pytest.mark.parametrize(
    ("point", "victim"),
    sampled(
        [("flush.write.before", 2), ("vote.before", 0), ("publish.link.before", 0)],
        keep=[("vote.before", 0)],
    ),
)
def test_a_rank_that_is_stopped_and_goes_on_takes_part_in_the_next_save(point, victim, shared_dir):
    pids = gathered(os.getpid())
    log = shared_dir / "fired"
    others = [rank for rank in range(3) if rank != victim]

    def during():
        if dist.get_rank() == others[0]:
            await_fired(log, point)
            stop(pids[victim])

    @contextlib.contextmanager
    def stopped():
        entries = f"{point}=sleep:10"
        with silence(8), armed_on(victim, entries, log, natively=point.startswith(NATIVE)):
            yield

    def failed():
        # Only when the other ranks have been told does it go on.
        mine = shared_dir / f"told{dist.get_rank()}"
        mine.touch()
        if dist.get_rank() == others[0]:
            await_that(lambda: all((shared_dir / f"told{rank}").exists() for rank in others))
            go_on(pids[victim])

    # A coordinator that is about to publish is kept from it, and told so by its file system alone.
    words = () if point.startswith("publish") else (f"rank {victim}", "silent")
    everyone = fault_between_saves(
        shared_dir / "c", stopped(), *words, during=during, afterwards=failed
    )
    _all_failed(everyone)
    assert any("silent" in error.text for error in everyone[others[0]])


@ranks(4)
def test_a_rank_above_one_that_is_stopped_hears_of_the_commit(shared_dir):
    """Gloo's broadcast goes by rank 1 to rank 3: rank 1 waits for it, and need not."""
    pids = gathered(os.getpid())
    rank = dist.get_rank()
    save_over({f"w{rank}": torch.ones(1000)}, shared_dir / "c").result(60)
    dist.barrier()
    with silence(8), held("publish.decide.before", 0) as publication:
        save = save_over({f"w{rank}": torch.zeros(1000)}, shared_dir / "c")
        if rank == 0:
            assert publication.reached.wait(60)
            time.sleep(0.5)  # all have voted by now, and wait for the outcome
            stop(pids[3])
            publication.go_on.set()
        try:
            save.result(60)
        finally:
            if rank != 3:
                (shared_dir / f"told{rank}").touch()
            if rank == 0:
                await_that(lambda: all((shared_dir / f"told{n}").exists() for n in range(3)))
                go_on(pids[3])
    assert committed(shared_dir / "c")
    dist.barrier()
