"""Loads of several ranks: no collective of the training job, bounds and names for every wait, one outcome for all."""

from __future__ import annotations

import logging
import re
import time

import pytest
import torch
import torch.distributed as dist
from support.jobs.groups import forbid_collectives
from support.jobs.ranks import ranks
from support.state.checkpoints import raises, save
from support.waiting import await_that, lines
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from dcp_datastates import CheckpointManager, load
from dcp_datastates.commit.group import commit_group
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    ConfigurationError,
    IncompatibleStateError,
    RankLostError,
    UnsafeObjectError,
)
from dcp_datastates.io import restore
from dcp_datastates.loading.session import Step, load_session
from dcp_datastates.manager.frameworks import alike
from dcp_datastates.process import waiting
from dcp_datastates.ranks.rank_set import rank_set_of


@ranks(4)
def test_no_collective_runs_and_every_rank_gets_its_shard(shared_dir):
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (4,))
    full = torch.arange(40.0).reshape(20, 2)
    torch.manual_seed(0)  # the same model on all ranks
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    expected = model.weight.detach().clone()
    saved = {"w": distribute_tensor(full, mesh, [Shard(0)]), f"r{rank}": rank}
    found = {"w": distribute_tensor(torch.zeros(20, 2), mesh, [Shard(0)]), f"r{rank}": None}
    with CheckpointManager(shared_dir, every=1) as manager:
        manager.save(1, {"model": model, "optimizer": optimizer, "more": saved})
    torch.nn.init.zeros_(model.weight)
    with CheckpointManager(shared_dir, every=1) as manager, pytest.MonkeyPatch.context() as patch:
        forbid_collectives(patch)
        state = {"model": model, "optimizer": optimizer, "more": found}
        assert manager.restore_latest(state) == 1
        for _ in range(3):
            load(shared_dir / "step-1", {"more": found}, only="more", unexpected="error")
    assert torch.equal(found["w"].to_local(), saved["w"].to_local())
    assert found[f"r{rank}"] == rank
    assert torch.equal(model.weight, expected)


@ranks(3)
def test_what_each_rank_reads_alone_fails_on_all_with_one_error(shared_dir):
    """As integrations read the files of each rank: damage that one rank sees ends the load on all."""

    def read() -> str:
        if dist.get_rank() == 1:
            raise CheckpointCorruptError("a file of rank 1")
        return "mine"

    with pytest.MonkeyPatch.context() as patch:
        forbid_collectives(patch)
        with raises(CheckpointCorruptError, "a file of rank 1"):
            alike(shared_dir / "c", read)
        assert alike(shared_dir / "c", dist.get_rank) == dist.get_rank()


@ranks(3)
def test_a_rank_that_does_not_come_is_named_and_the_wait_has_a_bound(shared_dir):
    save({"w": torch.ones(3)}, shared_dir / "c")
    ended = [shared_dir / f"ended{rank}" for rank in range(3)]
    if dist.get_rank() == 2:
        await_that(lambda: ended[0].exists() and ended[1].exists(), seconds=60)
        ended[2].touch()
    else:
        with pytest.MonkeyPatch.context() as patch, lines(logging.WARNING) as said:
            patch.setattr(waiting, "FIRST_LINE_SECONDS", 1.0)
            with pytest.raises(RankLostError, match=r"rank 2 has not called load\(\)"):
                load(shared_dir / "c", {"w": torch.zeros(3)}, timeout=6)
        assert any("rank 2 has not called load()" in line for line in said)
        ended[dist.get_rank()].touch()
        await_that(ended[2].exists)
    # The rank that was late finds that the others have given that load up; then all are in step again.
    if dist.get_rank() == 2:
        with pytest.raises(RankLostError, match=r"given up|has not called"):
            load(shared_dir / "c", {"w": torch.zeros(3)}, timeout=60)
    found = {"w": torch.zeros(3)}
    load(shared_dir / "c", found)
    assert found["w"].all()


class _Busy:
    """Work of another kind: the rank's beat changes all the time."""

    doing = "saving"

    @property
    def value(self):
        return time.monotonic_ns()


@ranks(2)
@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_other_work_is_waited_for_within_the_same_bound(absent, shared_dir):
    save({"w": torch.ones(3)}, shared_dir / "c")
    ended = shared_dir / "ended"
    if dist.get_rank() == absent:
        group, busy = commit_group(rank_set_of(None)), _Busy()
        group.reading(busy, True)
        group.detector.save_started()
        await_that(ended.exists)
        group.detector.save_ended()
        group.reading(busy, False)
    else:
        began = time.monotonic()
        with pytest.raises(RankLostError, match=r"rank 1 has not called|waiting for rank 0"):
            load(shared_dir / "c", {"w": torch.zeros(3)}, timeout=2)
        assert time.monotonic() - began < 30
        ended.touch()
    dist.barrier()


@ranks(3)
def test_ranks_that_fail_before_the_first_byte_fail_all_and_change_nothing(shared_dir):
    save({"w": torch.ones(3)}, shared_dir / "c")
    found, path = {"w": torch.zeros(3)}, shared_dir / "c"
    if dist.get_rank() == 2:
        path = shared_dir / "elsewhere" / "c"  # as if its file system were not mounted
    with pytest.raises(CheckpointNotFoundError, match="elsewhere"):
        load(path, found)
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        load(shared_dir / "nowhere", found)
    assert not found["w"].any()
    load(shared_dir / "c", found)
    assert found["w"].all()


WRONG = {
    "path": None,
    "state": [],
    "only": 3,
    "exclude": None,
    "storage_options": {"a": 1},
    "timeout": 0,
    "unknown": 1,
}


@ranks(2)
@pytest.mark.parametrize("place", [0, 1])
def test_an_argument_that_cannot_work_on_one_rank_fails_the_load_on_all_at_once(place, shared_dir):
    path, found = shared_dir / "c", {"w": torch.zeros(3)}
    save({"w": torch.ones(3)}, path)
    for name, value in WRONG.items():
        wrong = {name: value} if dist.get_rank() == place else {}
        with raises(ConfigurationError, name, f"rank {place} has called load() so"):
            load(**{"path": path, "state": found, **wrong})
    assert not found["w"].any()
    load(path, found)
    assert found["w"].all()


@ranks(2)
def test_ranks_that_load_different_checkpoints_are_told_so(shared_dir):
    for name in ("one", "other"):
        save({"w": torch.ones(3)}, shared_dir / name)
    with pytest.raises(ConfigurationError, match=r"rank 0 loads 'one' and rank 1 loads 'other'"):
        load(shared_dir / ("other" if dist.get_rank() else "one"), {"w": torch.zeros(3)})


@ranks(2)
def test_ranks_that_see_different_attempts_load_nothing(shared_dir):
    """As where the path is not shared: each has a directory of this name."""
    for rank in range(2):
        save({"w": torch.ones(3)}, shared_dir / f"of {rank}" / "c")
    found = {"w": torch.zeros(3)}
    with pytest.raises(CheckpointReplacedError, match="ranks see different attempts"):
        load(shared_dir / f"of {dist.get_rank()}" / "c", found)
    assert not found["w"].any()


@ranks(2)
def test_a_rank_that_fails_between_two_steps_lets_the_others_go(shared_dir):
    def come():
        with load_session(rank_set_of(None), [shared_dir], "load()", 300.0) as session:
            if dist.get_rank() == 1:
                raise ZeroDivisionError("in the program")
            session.end(Step.OPEN, lambda: b"", lambda notes: [b""] * len(notes))

    expected = ZeroDivisionError if dist.get_rank() else RankLostError
    with pytest.raises(expected, match="in the program"):
        come()


@ranks(2)
def test_names_that_no_rank_takes_are_told_once_for_all_ranks(shared_dir):
    """As pipeline stages: each rank has names of its own."""
    mine = f"stage{dist.get_rank()}"
    save({mine: torch.ones(3), "all": torch.ones(2)}, shared_dir / "c")
    load(shared_dir / "c", {mine: torch.zeros(3), "all": torch.zeros(2)}, unexpected="error")
    with pytest.raises(IncompatibleStateError, match="1 of the 3 stored") as caught:
        load(shared_dir / "c", {mine: torch.zeros(3)}, unexpected="error")
    assert caught.value.unexpected == ("all",)


@ranks(2)
def test_an_object_that_one_rank_refuses_changes_nothing_on_any_rank(shared_dir):
    mine = f"of rank {dist.get_rank()}"
    save({"w": torch.ones(3), mine: re.IGNORECASE if dist.get_rank() else 7}, shared_dir / "c")
    found = {"w": torch.zeros(3), mine: "as it was"}
    with pytest.raises(UnsafeObjectError, match=r"'of rank 1'.*re\.RegexFlag") as caught:
        load(shared_dir / "c", found)
    assert "half loaded" not in str(caught.value)
    assert (found["w"].any(), found[mine]) == (False, "as it was")
    load(shared_dir / "c", found, allow_objects=True)
    assert found["w"].all()


@ranks(2)
def test_a_slow_rank_that_makes_progress_is_waited_for(shared_dir):
    save({"w": torch.ones(1 << 20)}, shared_dir / "c")
    found = {"w": torch.zeros(1 << 20)}
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            real = restore._await

            def slow(job, place, count):
                for _ in range(12):
                    count(1)
                    time.sleep(0.5)
                real(job, place, count)

            patch.setattr(restore, "_await", slow)
        load(shared_dir / "c", found, timeout=5)
    assert found["w"].all()


@ranks(2)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_local_tensor_that_is_not_the_shard_of_its_placements_is_refused(rows, shared_dir):
    save({"w": torch.arange(4.0)}, shared_dir / "c")
    mesh, local = init_device_mesh("cpu", (2,)), torch.zeros(rows)
    shape = {"shape": torch.Size((4,)), "stride": (1,)}
    value = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **shape)
    with raises(IncompatibleStateError, "'w'", f"({rows},)", "(2,)"):
        load(shared_dir / "c", {"w": value})
    assert not local.any()
