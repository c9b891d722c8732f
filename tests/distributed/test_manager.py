"""``CheckpointManager`` on several ranks: they save, stop and restore alike."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist
from support.jobs.groups import gathered
from support.jobs.processes import run_ranks
from support.jobs.ranks import ranks, run_on_ranks
from support.state.checkpoints import CACHE, raises
from support.state.roots import committed_names
from support.waiting import await_that, lines
from torch.distributed.fsdp import fully_shard

from dcp_datastates import AutoInterval, CheckpointManager, Keep, PerRank, RngState
from dcp_datastates.commit.group import commit_group
from dcp_datastates.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    IncompatibleStateError,
    RankLostError,
)
from dcp_datastates.io import committed
from dcp_datastates.manager import step_consensus
from dcp_datastates.manager.frameworks import BackgroundSaves
from dcp_datastates.manager.step_consensus import StepConsensus
from dcp_datastates.ranks.connection import Connection
from dcp_datastates.ranks.rank_set import rank_set_of


def manager(root, every, **options):
    return CheckpointManager(root, every=every, **{"host_cache_size": CACHE, **options})


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
def test_all_ranks_are_refused_in_the_root_of_a_former_run(shared_dir):
    with manager(shared_dir, 1) as checkpoints:
        checkpoints.save(7, {"w": torch.ones(10)})
    with manager(shared_dir, 1) as checkpoints, raises(ConfigurationError, "has step-7"):
        checkpoints.save(0, {"w": torch.ones(10)})
    with manager(shared_dir, 1, keep=1, fresh="replace") as checkpoints:
        checkpoints.save(0, {"w": torch.ones(10)})
    dist.barrier()
    assert committed_names(shared_dir) == ["step-0"]


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


def save_a_sharded_loop(shared_dir):
    torch.manual_seed(0)
    loop = sharded()
    random.seed(dist.get_rank())
    with manager(shared_dir, 2, keep=Keep(last=1), save_last=False) as checkpoints:
        assert checkpoints.restore_latest(loop) is None
        for step in range(1, 4):
            advance(loop)
            checkpoints.save(step, loop)
            if step == 2:
                weights = loop["model"].weight.full_tensor()
    if dist.get_rank() == 0:
        torch.save(weights, shared_dir / "weights")
    (shared_dir / f"random-{dist.get_rank()}").write_text(str(random.random()))


def sharded():
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(16, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "rng": RngState()}


def advance(loop):
    random.random()
    loop["model"](torch.ones(2, 16)).square().sum().backward()
    loop["optimizer"].step()
    loop["optimizer"].zero_grad()


def restore_on_as_many_ranks(shared_dir):
    loop = sharded()
    with manager(shared_dir, 2) as checkpoints:
        assert checkpoints.restore_latest(loop) == 2
    advance(loop)
    assert str(random.random()) == (shared_dir / f"random-{dist.get_rank()}").read_text()


def restore_on_fewer_ranks(shared_dir):
    loop = sharded()
    random.seed(99)
    before = random.getstate()
    with lines() as said, manager(shared_dir, 2) as checkpoints:
        assert checkpoints.restore_latest(loop) == 2
    assert random.getstate() == before
    assert any("3 ranks, and there are 2 now" in line for line in said)
    assert loop["optimizer"].state_dict()["state"][0]["step"] == 2
    assert torch.equal(loop["model"].weight.full_tensor(), torch.load(shared_dir / "weights"))


def test_a_loop_goes_on_at_the_same_and_at_another_number_of_ranks(shared_dir):
    run_on_ranks(3, save_a_sharded_loop, shared_dir=shared_dir)
    run_on_ranks(3, restore_on_as_many_ranks, shared_dir=shared_dir)
    run_on_ranks(2, restore_on_fewer_ranks, shared_dir=shared_dir)


class Position:
    """How many samples of an epoch this rank has taken."""

    def __init__(self, sampler):
        self.sampler, self.taken = sampler, 0

    def take(self):
        self.taken += 1
        return next(self.samples)

    def begin(self):
        self.samples = iter(self.sampler)

    def state_dict(self):
        return {"epoch": self.sampler.epoch, "taken": self.taken}

    def load_state_dict(self, state):
        self.sampler.set_epoch(state["epoch"])
        self.taken = state["taken"]
        self.sampler.load_state_dict({"yielded": self.taken})


def shared_out(states):
    taken = sum(state["taken"] for state in states)
    return {**states[0], "taken": taken // dist.get_world_size()}


def position():
    samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")
    return Position(samplers.StatefulDistributedSampler(range(60), seed=7))


def save_positions(shared_dir):
    at = position()
    at.sampler.set_epoch(2)
    at.begin()
    taken = [at.take() for _ in range(4)]
    with manager(shared_dir, 1, save_last=False) as checkpoints:
        checkpoints.save(1, {"at": PerRank(at, merge=shared_out)}).result(60)
    torch.save(taken, shared_dir / f"taken-{dist.get_rank()}")


def go_on_with_other_positions(shared_dir):
    world, alone = dist.get_world_size(), position()
    with manager(shared_dir, 1, save_last=False) as checkpoints:
        with raises(IncompatibleStateError, f"saved by 3 ranks, and there are {world} now"):
            checkpoints.restore(1, {"at": PerRank(alone)})
        assert alone.taken == 0
        at = position()
        checkpoints.restore(1, {"at": PerRank(at, merge=shared_out)})
    assert at.taken == 12 // world
    at.begin()
    rest = gathered(list(at.samples))
    taken = [torch.load(shared_dir / f"taken-{rank}") for rank in range(3)]
    assert sorted(itertools.chain(*taken, *rest)) == list(range(60)), (
        "each sample of the epoch once"
    )


def test_a_loop_goes_on_in_the_epoch_at_another_number_of_ranks(shared_dir):
    run_on_ranks(3, save_positions, shared_dir=shared_dir)
    for world in (2, 4):
        run_on_ranks(world, go_on_with_other_positions, shared_dir=shared_dir)


class Broken:
    def state_dict(self):
        raise OSError("the loader's cache is gone")

    def load_state_dict(self, state):
        raise AssertionError


@ranks(2)
def test_a_part_that_fails_on_one_rank_fails_the_save_on_all(shared_dir):
    with manager(shared_dir, 1) as checkpoints:
        state = {"w": torch.ones(10)}
        if dist.get_rank() == 1:
            assert checkpoints.save(1, {**state, "loader": PerRank(Broken())}) is None
        else:
            assert checkpoints.save(1, state).wait(60)
        checkpoints.save(2, state).result(60)
    assert checkpoints.failures == 1
    dist.barrier()
    assert committed_names(shared_dir) == ["step-2"]


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
