"""Committed on all ranks or on none, in the order of the saves, whatever one rank does."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import warnings
from concurrent.futures import wait

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.crashes.failing import armed, held
from support.jobs.groups import own_group
from support.jobs.ranks import ranks
from support.state.checkpoints import (
    CACHE,
    assert_same,
    async_save,
    attempts,
    committed,
    load_everything,
    raises,
    save,
    writer,
)
from support.tiers import sampled
from support.waiting import await_that, lines
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

import dcp_datastates
from dcp_datastates.commit.group import commit_group
from dcp_datastates.commit.place import Round
from dcp_datastates.dcp import compat
from dcp_datastates.errors import (
    CheckpointSkipped,
    ConfigurationError,
    RankLostError,
    SaveAbandonedError,
    SaveFailedError,
    StorageError,
    UnsupportedTensorError,
)
from dcp_datastates.ranks.rank_set import rank_set_of


def _state(number):
    rank = dist.get_rank()
    return {f"w{rank}": torch.full((50_000,), float(number)), "object": {"n": number}}


def _number(path):
    found = load_everything(path)
    for rank in range(dist.get_world_size()):
        assert found[f"w{rank}"].eq(found["object"]["n"]).all(), "a blend of two checkpoints"
    return found["object"]["n"]


def _begin(number, path, **options):
    options = {"host_cache_size": CACHE, "reads": "immediate", **options}
    return dcp_datastates.async_save(_state(number), path, **options)


def _on(rank, entries):
    return armed(entries) if dist.get_rank() == rank else contextlib.nullcontext()


def _everywhere(path):
    """All ranks are through with the save before anyone looks."""
    dist.barrier()
    return attempts(path)


@ranks(3)
def test_async_save_does_not_mix_with_training_on_the_default_gloo_group(shared_dir):
    for number in range(3):
        response = _begin(number, shared_dir / "c")
        assert isinstance(response, AsyncSaveResponse)
        for _ in range(200):
            tensor = torch.full((10,), float(dist.get_rank()))
            dist.all_reduce(tensor)
            assert tensor.eq(3.0).all(), "another collective's bytes"
        response.staging_completion.result(60)
        response.upload_completion.result(60)
        assert _number(shared_dir / "c") == number, "the future returned before the commit"
        dist.barrier()


@ranks(2)
def test_a_failure_in_the_background_is_told_by_committed_wait_and_the_log(shared_dir):
    ours = writer(shared_dir / "c", reads="immediate")
    with lines(logging.ERROR) as said, _on(0, "publish.write.before=error:EIO"):
        dcp_datastates.async_save(_state(1), writer=ours)
        with raises(StorageError, "Input/output error", "rank 0"):
            ours.wait()
        ours.wait()  # said once
        dcp_datastates.async_save(_state(2), writer=ours)
        with raises(StorageError, "Input/output error", "rank 0"):
            ours.committed.result(60)
        dcp_datastates.async_save(_state(3), writer=ours)
        assert wait([ours.committed], 60).done  # and is not asked
    assert len(said) == 3, said
    assert all("Input/output error" in line for line in said)
    dcp_datastates.async_save(_state(4), writer=ours)
    with raises(StorageError, "Input/output error"):
        ours.wait()
    assert _number(shared_dir / "c") == 4


class _Durable:
    """A part that is on stable storage."""

    error = None
    progress = 0

    def wait(self, seconds):
        return True

    def cancel(self):
        pass

    def check(self):
        pass


@ranks(2)
def test_a_rank_that_is_several_rounds_behind_votes_in_none_that_is_decided(shared_dir):
    _begin(0, shared_dir / "c").result(60)
    group = commit_group(rank_set_of(None))
    numbers = [group.draw(), group.draw()] if dist.get_rank() == 0 else [0, 0]
    dist.broadcast_object_list(numbers, src=0)
    patience = 1 if dist.get_rank() == 0 else 60
    rounds = [Round(number, None, None, _Durable(), timeout=patience) for number in numbers]
    if dist.get_rank() == 0:  # it gives the other up in both
        for each in rounds:
            group.submit(each)
        wait([each.committed for each in rounds], 60)
    dist.barrier()
    if dist.get_rank() == 1:
        for each in rounds:
            group.submit(each)
    _begin(1, shared_dir / "c").result(60)
    for each in rounds:
        assert isinstance(each.committed.exception(60), RankLostError)
    assert _number(shared_dir / "c") == 1


@ranks(2)
def test_the_next_save_is_flushed_while_one_commits_and_outcomes_keep_their_order(shared_dir):
    """The first save's publication is held until the second is on disk, whole."""
    path = shared_dir / "c"
    _begin(0, path).upload_completion.result(60)
    dist.barrier()
    order = []
    with held("publish.decide.before", 0) as publication:
        first = _begin(1, path)
        second = _begin(2, path)
        first.upload_completion.add_done_callback(lambda _: order.append(1))
        second.upload_completion.add_done_callback(lambda _: order.append(2))
        second.staging_completion.result(60)
        await_that(lambda: _newest_is_written(path), otherwise="it waits for the first's commit")
        assert not first.upload_completion.done()
        dist.barrier()
        publication.go_on.set()
        first.upload_completion.result(60)
        second.upload_completion.result(60)
    await_that(lambda: len(order) == 2)
    assert order == [1, 2]
    assert _number(path) == 2
    dist.barrier()
    (only,) = _everywhere(path)
    assert only.is_dir()


def _newest_is_written(path):
    found = attempts(path)
    files = list(found[-1].glob(f"r{dist.get_rank():05d}-*.safetensors"))
    return len(found) == 3 and bool(files) and files[0].stat().st_blocks > 0


@ranks(4)
def test_a_group_that_dcp_does_not_use_is_found_and_explained(shared_dir):
    halves = [dist.new_group([0, 1], backend="gloo"), dist.new_group([2, 3], backend="gloo")]
    half = dist.get_rank() // 2
    with raises(ConfigurationError, "2 ranks", "commits with 4", "process_group="):
        async_save(_state(1), shared_dir / f"c{half}", group=halves[half], reads=0.1).result(60)


@ranks(4)
def test_saves_by_a_group_of_some_ranks(shared_dir):
    halves = [dist.new_group([0, 2], backend="gloo"), dist.new_group([1, 3], backend="gloo")]
    half = dist.get_rank() % 2
    with raises(ConfigurationError, "does not contain|not this process's"):
        try:
            writer(shared_dir / "x", process_group=halves[1 - half])
        except ConfigurationError as error:
            raise ConfigurationError(f"does not contain|not this process's {error}") from error
    for number in range(3):
        response = dcp_datastates.async_save(
            {f"w{dist.get_rank()}": torch.full((9,), float(number))},
            shared_dir / str(half),
            process_group=halves[half],
            host_cache_size=CACHE,
        )
        response.upload_completion.result(60)
        found = load_everything(shared_dir / str(half))
        expected = {f"w{rank}": torch.full((9,), float(number)) for rank in (half, half + 2)}
        assert_same(found, expected)
        dist.barrier()


@ranks(2)
def test_training_on_dcps_gloo_group_is_warned_of_once(shared_dir, monkeypatch):
    monkeypatch.setattr(compat, "_warned", False)
    # Earlier tests have left theirs.
    monkeypatch.setattr(compat, "_is_another_group_there", lambda: False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            dcp.async_save(_state(number), storage_writer=writer(shared_dir / "c", reads=0)).result(
                60
            )
    said = [str(each.message) for each in caught if "new_group" in str(each.message)]
    assert len(said) == 1, said
    assert "process_group=" in said[0]
    monkeypatch.undo()
    monkeypatch.setattr(compat, "_warned", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async_save(_state(2), shared_dir / "c", group=own_group(), reads=0).result(60)
        _begin(3, shared_dir / "c").upload_completion.result(60)
    assert not [each for each in caught if "new_group" in str(each.message)]


@ranks(3)
def test_what_only_one_rank_cannot_capture_fails_the_save_on_all(shared_dir):
    state = _state(1)
    if dist.get_rank() == 1:
        state["sparse"] = torch.eye(3).to_sparse()
    group = own_group()
    with raises(UnsupportedTensorError, "sparse"):
        async_save(state, shared_dir / "c", group=group).result(60)
    with raises(UnsupportedTensorError, "rank 1", "sparse"):
        dcp_datastates.async_save(
            state, shared_dir / "c", host_cache_size=CACHE
        ).upload_completion.result(60)
    with raises(UnsupportedTensorError, "rank 1", "sparse"):
        save(state, shared_dir / "c")
    assert not committed(shared_dir / "c")
    dist.barrier()
    _begin(2, shared_dir / "c").upload_completion.result(60)
    assert _number(shared_dir / "c") == 2


@ranks(2)
@pytest.mark.parametrize("commits_there", [False, True])
def test_ranks_that_mean_different_directories_do_not_commit(commits_there, shared_dir):
    mine = shared_dir / f"host{dist.get_rank()}" / "c"
    if commits_there and dist.get_rank() == 1:
        mine.mkdir(parents=True)
        (mine / ".metadata").write_bytes(b"what is there is not ours to touch")
    with raises(ConfigurationError, "rank 1", "does not see", str(mine)):
        _begin(1, mine).upload_completion.result(60)
    dist.barrier()
    if dist.get_rank() == 0:
        assert not committed(mine)
    elif commits_there:
        assert [each.name for each in mine.iterdir()] == [".metadata"]
    else:
        assert not mine.exists(), "what was made to see is gone again"


@ranks(2)
def test_a_job_that_was_overtaken_at_its_path_does_not_commit(shared_dir):
    """Its successor commits while it hesitates; it wakes, sees that, and leaves no trace."""
    path = shared_dir / "c"
    _begin(1, path).upload_completion.result(60)
    dist.barrier()
    with held("vote.after", 0) as hesitation:
        response = _begin(2, path)
        if dist.get_rank() == 0:
            assert hesitation.reached.wait(60)
            (first, *_) = attempts(path)
            shutil.copytree(first, path / "1fffffffffffffff-00000001")
            hesitation.go_on.set()
        with raises(SaveFailedError, "two jobs", "rank 0"):
            response.upload_completion.result(60)
    assert committed(path)
    assert len(_everywhere(path)) == 2


_FIRST = ("publish.decide.before", "vote.before")
"""Where a rank is held so that the other has no save in flight, or is through with all but the outcome."""


@ranks(2)
@pytest.mark.parametrize("only", sampled([0, 1], keep=[1]))
def test_a_save_that_comes_too_fast_is_skipped_by_all_ranks(only, shared_dir):
    """Only one rank is behind; both leave the save out, and read nothing of it."""
    most = 1 if dist.get_rank() == only else 4
    ours = writer(when_behind="skip", max_in_flight=most, reads="immediate")
    group = own_group()
    with held(_FIRST[only], only) as first:
        async_save(_state(1), None, by=ours, group=group, checkpoint_id=shared_dir / "1")
        outcomes = [ours.committed]
        second = async_save(_state(2), None, by=ours, group=group, checkpoint_id=shared_dir / "2")
        outcomes.append(ours.committed)
        first.go_on.set()
        with raises(CheckpointSkipped, "skip"):
            second.result(60)
        behind = dist.get_rank() == only
        with raises(
            CheckpointSkipped if behind else SaveAbandonedError, "" if behind else "DCP ended"
        ):
            outcomes[1].result(60)
        outcomes[0].result(60)
    third = async_save(_state(3), None, by=ours, group=group, checkpoint_id=shared_dir / "3")
    third.result(60)
    ours.committed.result(60)
    dist.barrier()
    assert [committed(shared_dir / str(n)) for n in (1, 2, 3)] == [True, False, True]
    assert not (shared_dir / "2").exists()


@ranks(2)
@pytest.mark.parametrize("only", sampled([0, 1], keep=[0]))
def test_all_ranks_are_told_of_a_save_that_one_rank_leaves_out(only, shared_dir):
    """On the package's own path: in the first message of planning, and in the same words."""
    options = {"when_behind": "skip", "max_in_flight": 1, "reads": "immediate"}
    with held(_FIRST[only], only) as point:
        first = _begin(1, shared_dir / "1", **options)
        if dist.get_rank() != only:
            first.result(60)
        second = _begin(2, shared_dir / "2", **options)
        point.go_on.set()
        with raises(CheckpointSkipped, "all ranks skip this one"):
            second.result(60)
        first.result(60)
    _begin(3, shared_dir / "3", **options).result(60)
    dist.barrier()
    assert [committed(shared_dir / str(n)) for n in (1, 2, 3)] == [True, False, True]
    assert not (shared_dir / "2").exists()


@ranks(2)
def test_with_wait_the_training_thread_waits_for_the_oldest_and_no_save_is_lost(shared_dir):
    with held("publish.decide.before", 0) as publication:
        first = _begin(1, shared_dir / "1", max_in_flight=1)
        assert not first.upload_completion.done()
        dist.barrier()
        threading.Timer(0.5, publication.go_on.set).start()
        second = _begin(2, shared_dir / "2", max_in_flight=1)
        assert first.upload_completion.done()
        second.upload_completion.result(60)
    dist.barrier()
    assert _number(shared_dir / "1") == 1
    assert _number(shared_dir / "2") == 2


@ranks(2)
def test_saves_go_on_alone_when_the_process_group_is_gone_and_nothing_of_it_is_left(shared_dir):
    _begin(1, shared_dir / "c").upload_completion.result(60)
    dist.barrier()
    threads = {thread.name for thread in threading.enumerate()}
    assert "dcp_datastates-heartbeat" in threads
    rank = dist.get_rank()
    dist.destroy_process_group()
    mine = shared_dir / f"alone{rank}"
    response = dcp_datastates.async_save({"n": torch.tensor(rank)}, mine, host_cache_size=CACHE)
    response.upload_completion.result(60)
    assert load_everything(mine)["n"].item() == rank
    beats = "dcp_datastates-heartbeat"
    await_that(lambda: beats not in {thread.name for thread in threading.enumerate()})
    store = dist.FileStore(str(shared_dir / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    _begin(2, shared_dir / "c").upload_completion.result(60)
    assert _number(shared_dir / "c") == 2
