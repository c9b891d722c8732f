"""Steps that ranks do together: done on all, or one error on all; here over a store in memory."""

import errno

import pytest
from support.jobs.threads import Impatient, MemoryStore, rank_set
from support.jobs.threads import together as on_ranks

from dcp_datastates.commit.joint_steps import StepEnd, together
from dcp_datastates.errors import (
    CheckpointNotFoundError,
    DataStatesError,
    IncompatibleStateError,
    RankLostError,
    StorageError,
)
from dcp_datastates.ranks.meetings import Meetings
from dcp_datastates.storage.bounded import HungError


def _ends(*works, answer=lambda notes: notes, check=lambda rank: lambda: None):
    """What the step comes to on each rank."""
    ranks = [Meetings(each, "test") for each in rank_set(len(works), MemoryStore())]

    def run(meetings, rank):
        if works[rank] is None:
            return None  # it does not come

        def meet(message, answers):
            return meetings.meet(1, message, answers, check(rank))

        return together(meet, works[rank], answer, whole=True)

    return on_ranks(ranks, run)


def _raises(error):
    def work(*notes):
        raise error

    return work


def _done():
    return b"mine"


def test_a_step_that_is_done_gives_each_rank_its_answer():
    ends = _ends(
        *[_done] * 3, answer=lambda notes: [b"%d" % n + each for n, each in enumerate(notes)]
    )
    assert ends == [StepEnd(b"0mine"), StepEnd(b"1mine"), StepEnd(b"2mine")]


@pytest.mark.parametrize(
    "error",
    [
        IncompatibleStateError("no", unexpected=["a"], unfit={"b": "c"}),
        FileNotFoundError(errno.ENOENT, "gone", "/a"),
        StorageError(errno.ENOSPC, "full", "/\udcff"),
        CheckpointNotFoundError("nothing is there" * 100),
    ],
)
def test_the_error_of_one_rank_is_the_error_of_all(error):
    ends = _ends(_done, _raises(error), _done)
    for rank, end in enumerate(ends):
        told = end.error("there")
        assert (told is error) == (rank == 1)
        assert (type(told), str(told), vars(told)) == (type(error), str(error), vars(error))
        assert getattr(told, "errno", None) == getattr(error, "errno", None)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (type("OfTheProgram", (Exception,), {})("mine"), DataStatesError),
        (UnicodeDecodeError("utf-8", memoryview(b"a"), 0, 1, "mine"), DataStatesError),
        (HungError(5, "mine"), StorageError),
        (SystemExit("mine"), DataStatesError),
    ],
)
def test_an_error_that_only_its_own_rank_knows_is_told_in_words(error, kind):
    own, told = _ends(_raises(error), _done)
    assert error in (own, own.own) if isinstance(own, StepEnd) else own is error
    assert type(told.error("there")) is kind
    assert "mine" in str(told.error("there"))


def test_the_first_of_several_errors_counts_and_each_rank_keeps_its_own_as_the_cause():
    errors = [StorageError(errno.EIO, f"disk {rank}") for rank in range(11)]
    ends = _ends(_done, *map(_raises, errors))
    for end in ends:
        assert str(end.error("there")) == str(errors[0])
        assert (len(end.failed.reasons), end.failed.more) == (8, 3)
    assert ends[1].error("there") is errors[0]
    assert ends[3].error("there").__cause__ is errors[2]


def test_an_answer_that_fails_fails_the_step_on_all():
    ends = _ends(_done, _done, answer=_raises(KeyError("plan")))
    assert [str(end.error("there")) for end in ends] == ["'plan'"] * 2


@pytest.mark.parametrize("mine", [None, StorageError(errno.EIO, "mine")])
def test_a_rank_that_leaves_tells_the_others_why_but_their_own_error_comes_first(mine):
    late = Impatient(3, RankLostError("rank 2 is late"))
    first, left, _ = _ends(
        _raises(mine) if mine else _done,
        _done,
        None,
        check=lambda rank: late if rank else lambda: None,
    )
    assert isinstance(left, RankLostError)
    told = first.error("there")
    assert told is mine if mine else (type(told), str(told)) == (RankLostError, "rank 2 is late")


def test_an_interrupt_stays_on_its_rank_and_keeps_its_cause():
    interrupt = KeyboardInterrupt()
    interrupt.__cause__ = ValueError("why")
    own, other = _ends(_raises(interrupt), _done)
    assert own is interrupt
    assert str(own.__cause__) == "why"
    assert "KeyboardInterrupt" in str(other.error("rank 0"))
