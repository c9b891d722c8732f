"""One rank looks, every rank gets its answer; no process group of the job is touched."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from support.jobs.groups import forbid_collectives, gathered
from support.jobs.ranks import ranks
from support.state.checkpoints import committed, save
from support.state.files import data_files
from support.waiting import await_that, lines
from torch.distributed import distributed_c10d

from dcp_datastates import latest, retain
from dcp_datastates.checkpoints import first_rank
from dcp_datastates.checkpoints.first_rank import from_first_rank
from dcp_datastates.errors import ConfigurationError, DataStatesError, NoAnswerError
from dcp_datastates.process import waiting


@ranks(4)
def test_the_first_rank_looks_and_every_rank_gets_its_answer_each_time():
    looked, rank = [], dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        forbid_collectives(patch)
        for call in range(3):
            answer = from_first_rank(
                lambda mine=("answer", rank, call): looked.append(1) or mine, "test", "a test"
            )
            assert answer == ["answer", 0, call], "as JSON has it, on the first rank, too"
    assert gathered(len(looked)) == [3, 0, 0, 0]
    first = from_first_rank(lambda: "one", "one", "one purpose")
    second = from_first_rank(lambda: "two", "another", "another purpose")
    assert (first, second) == ("one", "two")


@ranks(2)
def test_a_rank_that_waits_for_the_first_one_says_so():
    store = distributed_c10d._get_default_store()

    def look():
        store.wait(["the other rank has said so"])
        return 42

    with pytest.MonkeyPatch.context() as patch, lines(logging.WARNING) as said:
        patch.setattr(waiting, "FIRST_LINE_SECONDS", 0.05)
        if dist.get_rank():
            told = logging.Handler()
            told.emit = lambda record: store.set("the other rank has said so", "")
            first_rank.logger.addHandler(told)
        try:
            assert from_first_rank(look, "test", "a test") == 42
        finally:
            if dist.get_rank():
                first_rank.logger.removeHandler(told)
    assert any("rank 0 has not told a test" in line for line in said) == (dist.get_rank() == 1)


@ranks(4)
def test_an_error_of_the_first_rank_raises_on_every_rank_and_the_next_call_works():
    def fail():
        raise FileNotFoundError(2, "the words of rank 0", "/some/path")

    with pytest.raises(FileNotFoundError, match="the words of rank 0") as caught:
        from_first_rank(fail, "test", "a test")
    assert caught.value.errno == 2
    assert caught.value.filename == "/some/path"
    assert from_first_rank(lambda: dist.get_rank(), "test", "a test") == 0


class _OfTheProgram(Exception):
    pass


@ranks(4)
def test_an_error_that_does_not_travel_is_told_in_words():
    def fail():
        raise _OfTheProgram("the words of rank 0")

    with pytest.raises((_OfTheProgram, DataStatesError), match="the words of rank 0") as caught:
        from_first_rank(fail, "test", "a test")
    assert (caught.type is _OfTheProgram) == (dist.get_rank() == 0)


@ranks(4)
def test_an_answer_that_is_no_json_value_is_an_error_everywhere_not_a_hang():
    with pytest.raises(TypeError, match="not JSON serializable"):
        from_first_rank(lambda: lambda: None, "test", "a test", timeout=20)


@ranks(4)
def test_a_group_asks_its_own_first_rank():
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    assert from_first_rank(lambda: dist.get_rank(), "test", "a test", alone) == dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[dist.get_rank() // 2]
    for _ in range(2):
        answer = from_first_rank(lambda: dist.get_rank(), "test", "a test", mine)
        assert answer == dist.get_rank() // 2 * 2
    assert from_first_rank(lambda: dist.get_rank(), "test", "a test") == 0


@ranks(4)
def test_who_is_not_in_the_group_is_told_so():
    group = dist.new_group([1, 2])
    if dist.get_rank() in (1, 2):
        assert from_first_rank(lambda: dist.get_rank(), "test", "a test", group) == 1
    else:
        with pytest.raises(ConfigurationError, match="members"):
            from_first_rank(lambda: dist.get_rank(), "test", "a test", group)


@ranks(4)
def test_an_answer_that_does_not_come_ends_in_an_error_that_says_what_was_waited_for(shared_dir):
    others = [shared_dir / f"told{rank}" for rank in range(1, 4)]
    if dist.get_rank() == 0:
        await_that(lambda: all(each.exists() for each in others))
        assert from_first_rank(lambda: 1, "missing", "the missing thing") == 1
    else:
        with pytest.raises(
            NoAnswerError, match=r"rank 0 did not tell the missing thing within 1 s"
        ):
            from_first_rank(lambda: 1, "missing", "the missing thing", timeout=1)
        others[dist.get_rank() - 1].touch()
    dist.barrier()
    assert from_first_rank(lambda: dist.get_rank(), "missing", "the missing thing") == 0, (
        "in step again"
    )


# --- latest and retain ------------------------------------------------------------------------------------


@ranks(4)
def test_latest_is_the_same_everywhere_and_a_broken_one_is_left_out(shared_dir):
    assert latest(shared_dir) is None
    for number in (1, 2, 3):
        save({f"w{dist.get_rank()}": torch.ones(100)}, shared_dir / f"step-{number}")
    assert latest(shared_dir) == shared_dir / "step-3"
    dist.barrier()
    if dist.get_rank() == 0:
        data_files(shared_dir / "step-3")[2].unlink()
    assert latest(shared_dir) == shared_dir / "step-2"
    assert latest(shared_dir, verify="full") == shared_dir / "step-2"


@ranks(4)
def test_retain_tells_every_rank_the_same(shared_dir):
    for number in (1, 2, 3):
        save({f"w{dist.get_rank()}": torch.ones(100)}, shared_dir / f"step-{number}")
    assert retain(shared_dir, keep=1) == [shared_dir / "step-2", shared_dir / "step-1"]
    assert retain(shared_dir, keep=1) == []
    assert committed(shared_dir / "step-3")
    assert not (shared_dir / "step-1").exists()
