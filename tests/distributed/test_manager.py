"""``CheckpointManager`` on several ranks: they save, stop and restore alike."""

from __future__ import annotations

import itertools
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.jobs.groups import gathered
from support.jobs.processes import run_ranks
from support.jobs.ranks import ranks
from support.state.checkpoints import CACHE, raises
from support.state.loops import manager
from support.state.roots import committed_names
from support.waiting import await_that, lines

from dcp_datastates import AutoInterval, PerRank
from dcp_datastates.commit.group import commit_group
from dcp_datastates.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    RankLostError,
)
from dcp_datastates.io import committed
from dcp_datastates.manager import step_consensus
from dcp_datastates.manager.frameworks import BackgroundSaves
from dcp_datastates.manager.step_consensus import StepConsensus
from dcp_datastates.ranks.connection import Connection
from dcp_datastates.ranks.failure_detector import FailureDetector, Loss
from dcp_datastates.ranks.meetings import Meetings
from dcp_datastates.ranks.rank_set import rank_set_of


def agreed(value):
    """Whether all ranks have the same."""
    return all(each == value for each in gathered(value))


@ranks(3)
def test_a_signal_to_one_rank_makes_all_save_the_same_step_and_stop(shared_dir):
    with manager(shared_dir, 1000, on_signal=(signal.SIGUSR1,)) as checkpoints:
        for step in range(1, 30):
            if step == 7 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            checkpoints.save(step, {"w": torch.ones(10)})
            if checkpoints.stopping:
                break
    assert step == 8
    assert agreed(step)
    dist.barrier()
    assert committed_names(shared_dir) == ["step-8"]


@ranks(3)
def test_a_poll_in_an_evaluation_tells_all_ranks_of_a_signal_in_the_same_call(shared_dir):
    with manager(shared_dir, 1000, on_signal=(signal.SIGUSR1,)) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(10)})
        answers = [checkpoints.poll() for _ in range(3)]
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        answers += [checkpoints.poll() for _ in range(2)]
        assert not checkpoints.stopping
        checkpoints.save(2, {"w": torch.ones(10)})
        assert checkpoints.stopping
    assert answers == [False, False, False, False, True]
    dist.barrier()
    assert committed_names(shared_dir) == ["step-2"]


@ranks(2)
def test_where_a_loop_begins_is_a_line_of_the_job(shared_dir):
    for began in ("starting from scratch: ", "restored "):
        with lines() as said, manager(shared_dir, 1) as checkpoints:
            checkpoints.restore_latest({"w": torch.zeros(10)})
            checkpoints.save(checkpoints.latest_step or 0, {"w": torch.ones(10)}, force=True)
        found = [line for line in said if line.startswith((began, "closed: "))]
        assert len(found) == (2 if dist.get_rank() == 0 else 0)
        dist.barrier()


@ranks(2)
def test_ranks_may_spell_the_root_differently(shared_dir):
    """As with other mount points on other hosts."""
    rank = dist.get_rank()
    real = shared_dir / "real"
    real.mkdir(exist_ok=True)
    (shared_dir / f"mount-{rank}").symlink_to(real)
    with manager(shared_dir / f"mount-{rank}" / "run", 1) as checkpoints:
        checkpoints.save(0, {f"w{rank}": torch.full((1000,), 7.0)}).result()
        found = {f"w{rank}": torch.zeros(1000)}
        assert checkpoints.restore_latest(found, timeout=60) == 0
        assert found[f"w{rank}"].eq(7).all()


@ranks(3)
def test_a_time_that_is_over_on_one_rank_makes_all_save_once(shared_dir):
    saved = []
    with manager(shared_dir, "1h") as checkpoints:
        for step in range(1, 12):
            if step == 5 and dist.get_rank() == 2:
                checkpoints._schedule._saved_at -= 3600
            due = checkpoints.should_save(step)
            if checkpoints.save(step, {"w": torch.ones(10)}):
                saved.append(step)
            assert due == (step in saved)
    assert saved == [6]


@ranks(2)
def test_auto_chooses_the_same_interval_on_all_ranks(shared_dir):
    saved = []
    with manager(shared_dir, "auto") as checkpoints:
        for step in range(1, 400):
            time.sleep(0.001 * (1 + dist.get_rank()))  # ranks are not alike
            if checkpoints.save(step, {"w": torch.ones(10)}):
                saved.append(step)
            if len(saved) == 2 and "a step takes" in checkpoints.interval:
                break
    assert "a step takes" in checkpoints.interval
    assert agreed((checkpoints.interval, saved))


class Broken:
    def state_dict(self):
        raise OSError("the loader's cache is gone")

    def load_state_dict(self, state):
        raise AssertionError


@ranks(2)
def test_a_checkpoint_that_one_rank_cannot_open_is_left_out_on_all(shared_dir):
    state = {"w": torch.zeros(10)}
    with manager(shared_dir, 1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": torch.full((10,), float(step))})
        checkpoints.save(2, state, force=True)
    real = committed.open_committed

    def stale(directory):
        if directory.name == "step-2" and dist.get_rank() == 1:
            raise CheckpointNotFoundError(2, "a stale cache", str(directory))
        return real(directory)

    with pytest.MonkeyPatch.context() as patch, manager(shared_dir, 1) as checkpoints:
        patch.setattr(committed, "open_committed", stale)
        step = checkpoints.restore_latest(state)
    assert agreed((step, state["w"].tolist()))


@ranks(2)
def test_a_manager_of_before_the_process_group_is_refused(shared_dir):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)
        checkpoints = manager(shared_dir, 1)
    with checkpoints, raises(ConfigurationError, "after init_process_group"):
        checkpoints.save(1, {"w": torch.ones(10)})


@ranks(2)
def test_an_interval_stays_the_same_when_a_forced_save_fails_on_one_rank(shared_dir):
    saved = []
    with manager(shared_dir, AutoInterval(stall_budget=0.9)) as checkpoints:
        for step in range(1, 60):
            forced = step == 30
            state = {"w": torch.ones(10)}
            if forced and dist.get_rank() == 1:
                state["loader"] = PerRank(Broken())
            time.sleep(0.002)  # a step
            begun = checkpoints.save(step, state, force=forced)
            if begun or forced:
                saved.append(step)
    assert agreed(saved)
    assert agreed(checkpoints.failures)


# --- the exchange ------------------------------------------------------------------------------------


@ranks(4)
def test_the_numbers_of_a_step_are_the_greatest_of_all_ranks(shared_dir):
    talk = StepConsensus(rank_set_of(None))
    heard = []
    for step in range(10):
        heard.append(talk.take())
        talk.give([step, -dist.get_rank(), step * dist.get_rank()])
    talk.close()
    assert heard == [None, *([step, 0, 3 * step] for step in range(9))]


@ranks(3)
def test_a_connection_that_breaks_loses_no_numbers(shared_dir):
    rank = dist.get_rank()
    talk = StepConsensus(rank_set_of(None))
    real, calls = Connection.get, itertools.count()

    def breaks(connection, key):
        found = real(connection, key)
        if rank == 2 and key.endswith("/answer") and next(calls) == 3:
            raise RuntimeError("a cable was pulled")  # the others have the result
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "get", breaks)
        heard = []
        for step in range(8):
            heard.append(talk.take())
            talk.give([step, rank])
        heard.append(talk.take())
        talk.close()
    assert next(calls) > 4 or rank < 2, "nothing broke"
    assert heard == [None, *([step, 2] for step in range(8))]


@ranks(2)
def test_a_rank_that_ends_first_leaves_the_others_their_last_numbers(shared_dir):
    talk = StepConsensus(rank_set_of(None))
    talk.give([1])
    assert talk.take() == [1]
    if dist.get_rank() == 1:
        time.sleep(0.5)  # the other is closing by then
    talk.give([2])
    if dist.get_rank() == 1:
        assert talk.take() == [2]
    talk.close()


@ranks(2)
def test_a_rank_that_does_not_come_is_an_error_in_the_end(shared_dir):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_consensus, "_PATIENCE_SECONDS", 1.0)
        talk = StepConsensus(rank_set_of(None))
        if dist.get_rank() == 0:
            talk.give([1])
            with raises(TimeoutError, "every rank must call save"):
                talk.take()
        dist.barrier()
        talk.close()


@ranks(2)
def test_each_step_waits_anew_for_a_rank_that_counts_as_lost(shared_dir):
    def meet(meetings, number, message, answer, check):
        check()
        time.sleep(0.3)
        return SimpleNamespace(answer=message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_consensus, "_SILENCE_SECONDS", 0.5)
        patch.setattr(FailureDetector, "losses", lambda _: [Loss(0, "is silent")])
        patch.setattr(Meetings, "meet", meet)
        talk = StepConsensus(rank_set_of(None))
        for step in range(4):
            talk.give([step])
            assert talk.take() == [step]
    talk.close()


def die_before_the_first_save(root):
    checkpoints = manager(root, 1)
    others = commit_group(rank_set_of(None)).detector
    await_that(lambda: all(each.value for each in others._watched.values()))
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with raises(RankLostError, "rank 0 has not told what the root holds", "is dead"):
        checkpoints.save(1, {"w": torch.ones(10)})


def test_the_death_of_the_first_rank_in_an_evaluation_before_the_first_save_is_told(tmp_path):
    ended = run_ranks(f"{__name__}:die_before_the_first_save", 3, tmp_path, root=str(tmp_path))
    assert ended[0].killed
    for rank in (1, 2):
        ended[rank].result()


@pytest.mark.parametrize("kind", ["manager", "framework"])
@ranks(2)
def test_ranks_with_different_disks_end_the_job(kind, shared_dir):
    """No save can succeed there: training does not go on without checkpoints."""
    mine = shared_dir / f"host{dist.get_rank()}"
    state = {"w": torch.ones(10)}
    saves = manager(mine, 1) if kind == "manager" else BackgroundSaves({"host_cache_size": CACHE})

    def save(step):
        return (
            saves.save(step, state) if kind == "manager" else saves.start(state, mine / str(step))
        )

    with raises(ConfigurationError, "rank 1", "does not see"):
        save(1)
        saves.wait()
    dist.barrier()
    save(2).committed.exception(60)
    dist.barrier()
    with raises(ConfigurationError, "rank 1", "does not see"):
        save(3)
