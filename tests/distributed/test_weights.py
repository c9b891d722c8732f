"""Ranks publish the weights of sharded models together: whole tensors, one version or none."""

from __future__ import annotations

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from support.crashes.failing import armed_on, silence, variables
from support.jobs.processes import run_ranks
from support.jobs.ranks import run_on_ranks
from support.state.loops import manager
from support.state.meshes import Block, fsdp_tp, full, train
from support.tiers import tries
from support.waiting import await_that, lines
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from dcp_datastates import Weights, follow
from dcp_datastates.weights import version


def _publishes(path, shape, steps, delta=None, **options):
    model, optimizer = fsdp_tp(Block(hidden=256), shape)
    rules = Weights(path / "w", keep=None, delta=delta)
    with manager(path / "run", publish=rules, **options) as saves:
        saves.restore_latest({"model": model, "optimizer": optimizer})
        for step in steps:
            dense = {name: full(each) for name, each in model.state_dict().items()}
            if dist.get_rank() == 0:
                torch.save(dense, path / f"dense-{step}.pt")
            saves.save(step, {"model": model, "optimizer": optimizer})
            saves.wait()
            train(model, optimizer)


def _follows(path, shape):
    model, _ = fsdp_tp(Block(seed=1, hidden=256), shape)
    for each in follow(path / "w", timeout=0):
        each.load_into(model)
        dense = torch.load(path / f"dense-{each.step}.pt")
        for name, tensor in model.state_dict().items():
            assert torch.equal(full(tensor), dense[name]), name


def _steps(path):
    return [each.step for each in follow(path / "w", timeout=0)]


@pytest.mark.parametrize("shape", [(4, 1), (2, 2)])
def test_versions_of_a_sharded_model_are_whole_tensors(shape, shared_dir):
    run_on_ranks(4, _publishes, path=shared_dir, shape=shape, steps=range(3))
    assert _steps(shared_dir) == [0, 1, 2]
    for each in follow(shared_dir / "w", timeout=0):
        dense = torch.load(shared_dir / f"dense-{each.step}.pt")
        found = each.read()
        assert found.keys() == dense.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in dense.items())
        assert 2 <= len(list(each.path.glob("*.safetensors"))) <= 4
    run_on_ranks(2, _follows, path=shared_dir, shape=(2, 1))


class _Extra(Block):
    def get_extra_state(self):
        return {"scale": 1.0}

    def set_extra_state(self, state):
        pass


def _fills_wrapped(path):
    (newest,) = follow(path / "w", newest=True, timeout=0)
    plain, inputs = Block(hidden=256), torch.ones(4, 130)
    plain.load_state_dict(torch.load(path / f"dense-{newest.step}.pt"))
    for wrap in (
        DistributedDataParallel,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    ):
        model = wrap(_Extra(seed=1, hidden=256))
        model(inputs)
        newest.load_into(model)
        assert torch.equal(model(inputs), plain(inputs))


def test_a_version_fills_a_wrapped_model(shared_dir):
    run_on_ranks(1, _publishes, path=shared_dir, shape=(1, 1), steps=range(1))
    run_on_ranks(2, _fills_wrapped, path=shared_dir)


def test_a_job_goes_on_at_other_sizes(shared_dir):
    starts = itertools.count(0, 2)
    for world in (3, 1, 2):
        start = next(starts)
        steps = range(start, start + 2)
        run_on_ranks(world, _publishes, path=shared_dir, shape=(world, 1), steps=steps, delta="xor")
    assert _steps(shared_dir) == list(range(6))
    kinds = [version.is_delta(shared_dir / "w", number) for number in range(1, 7)]
    assert kinds == [False, True] * 3
    run_on_ranks(2, _follows, path=shared_dir, shape=(1, 2))


def _fails_once(path):
    with armed_on(1, "weights.write.before@1=error:EIO", path / "log"):
        _publishes(path, (3, 1), range(2))


def test_a_failure_of_one_rank_leaves_the_version_out_on_all(shared_dir):
    run_on_ranks(3, _fails_once, path=shared_dir)
    assert _steps(shared_dir) == [1]
    assert version.numbers_below(shared_dir / "w") == [2]


def publish_until_one_dies(path):
    """What each rank still logs of its second version."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    with silence(8.0), lines() as said, manager(path / "run", publish=Weights(path / "w")) as saves:
        for step in range(2):
            saves.save(step, {"model": model}).result()
            saves.wait()
    return said


def test_a_rank_that_dies_leaves_no_half_version_and_holds_up_nobody(tmp_path):
    environments = [{}, variables("weights.write.after@2=kill", tmp_path / "log"), {}]
    body = f"{__name__}:publish_until_one_dies"
    first, killed, last = run_ranks(body, 3, tmp_path, environments=environments, path=tmp_path)
    assert killed.killed
    for rank in (first, last):  # the last one may see that the first has ended, too
        (told,) = [line for line in rank.result() if "not published" in line]
        assert "step-1" in told
        assert "rank 1" in told or rank is last
    assert _steps(tmp_path) == [0]


PLACES = ("write.before", "write.after", "publish.before", "publish.after")


def _values(turn, step):
    """What the job of this turn holds at a step."""
    generator = torch.Generator().manual_seed(1000 * turn + step)
    return {f"w{n}": torch.randn(1 << 12, generator=generator) for n in range(4)}


def publish_until_killed(path, turn, steps):
    tensors = _values(turn, 0)
    rules = Weights(path / "w", part=None, keep=None, delta="xor", full_every=7)
    with silence(8.0), manager(path / "run", publish=rules, max_failures=None) as saves:
        done = saves.restore_latest(tensors)
        first = 0 if done is None else done + 1
        for step in range(first, first + steps):
            for name, tensor in _values(turn, step).items():
                tensors[name].copy_(tensor)
            saves.save(step, tensors)
            saves.wait()


@pytest.mark.parametrize("count", tries(12, 200))
def test_a_follower_has_each_version_whole_while_the_job_is_killed_and_restarted(count, tmp_path):
    turns, draw = (6 if count > 100 else 3), random.Random(count)
    followed, ended = [], threading.Event()

    def run() -> None:
        while not ended.is_set():
            for each in follow(
                tmp_path / "w", after=max(followed, default=0), poll=0.01, timeout=0.5
            ):
                found = each.read()
                candidates = [_values(turn, each.step) for turn in range(turns)]
                assert found.keys() == candidates[0].keys()
                assert any(
                    all(torch.equal(found[name], tensor) for name, tensor in candidate.items())
                    for candidate in candidates
                )
                followed.append(each.number)

    with ThreadPoolExecutor(1) as executor:
        following = executor.submit(run)
        for turn in range(turns):
            world, last = 1 + turn % 3, turn == turns - 1
            fault = f"weights.{draw.choice(PLACES)}@{draw.randint(2, max(2, count // turns))}=kill"
            chosen = draw.randrange(world) if "write" in fault else 0
            environments = [
                variables(fault, tmp_path / "log") if rank == chosen and not last else {}
                for rank in range(world)
            ]
            ranks_ = run_ranks(
                f"{__name__}:publish_until_killed",
                world,
                tmp_path,
                environments=environments,
                seconds=240,
                path=tmp_path,
                turn=turn,
                steps=count // turns,
            )
            assert last or ranks_[chosen].killed, ranks_
            assert not last or all(rank.exit_code == 0 for rank in ranks_), ranks_
        await_that(lambda: following.done() or (len(followed) and followed[-1] == _last(tmp_path)))
        ended.set()
        following.result()
    assert followed == sorted(set(followed))
    assert followed == [each.number for each in follow(tmp_path / "w", timeout=0)]
    assert len(followed) >= count // turns


def _last(path):
    return [n for n in version.numbers_below(path / "w") if version.is_published(path / "w", n)][-1]
