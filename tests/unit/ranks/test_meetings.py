"""How the ranks meet at the store: each number pairs with the same of the others, and no rank is stuck in one."""

import itertools
import os
import threading
import time

import pytest
import torch.distributed as dist
from support.crashes.residue import Residue, assert_nothing_left
from support.jobs.threads import Impatient, MemoryStore, rank_set, together

from dcp_datastates.errors import RankLostError
from dcp_datastates.ranks import failure_detector, meetings
from dcp_datastates.ranks.failure_detector import Loss, RankWait
from dcp_datastates.ranks.meetings import GivenUp, Meetings, Met


def _nothing():
    pass


def _all(messages):
    """Every rank is told what all have said."""
    return [b",".join(messages)] * len(messages)


def _each(messages):
    return [b"you said " + each for each in messages]


def _meetings(world, store=None):
    return [Meetings(each, "test") for each in rank_set(world, store or MemoryStore())]


def _meet(meeting, number, answer=_all, check=_nothing, name="", message=None):
    mine = b"%d" % meeting._rank_set.rank if message is None else message
    return meeting.meet(number, mine, answer, check, name)


def _impatient(looks):
    return Impatient(looks, RankLostError("rank 1 has not called"))


@pytest.mark.parametrize("world", [2, 18])
@pytest.mark.parametrize("answer", [_all, _each])
def test_each_rank_gets_its_answer_and_nothing_is_left(world, answer):
    before = Residue.now()
    store = MemoryStore()
    ranks = _meetings(world, store)
    said = [b"%d" % rank for rank in range(world)]
    for number in range(1, 4):
        met = together(ranks, lambda each, _, number=number: _meet(each, number, answer))
        assert met == [Met(each) for each in answer(said)]
    assert store.real.num_keys() == 2 + 3, "more than the job's own, and one for each meeting"
    del ranks
    assert_nothing_left(before)


@pytest.mark.parametrize("nbytes", [4 << 10, 5 << 10, 9 << 20])
@pytest.mark.parametrize("random", [os.urandom, bytes])
def test_a_message_and_an_answer_of_any_length_travel_in_pieces(nbytes, random):
    store = MemoryStore()
    store.real = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = _meetings(3, store)
    keys = store.real.num_keys()
    message = random(nbytes)  # torch's store takes no value of 9 MiB
    met = together(ranks, lambda each, rank: _meet(each, 1, _each, message=message + bytes([rank])))
    assert met == [Met(b"you said " + message + bytes([rank])) for rank in range(3)]
    assert (
        together(ranks, lambda each, _: _meet(each, 2, _all, message=message))
        == [Met(b",".join([message] * 3))] * 3
    )
    assert store.real.num_keys() == keys + 2 + 2, "pieces are left"


def test_a_meeting_asks_the_store_for_little():
    store = MemoryStore()
    ranks = _meetings(9, store)
    together(ranks, lambda each, _: _meet(each, 1))
    store.requests = 0
    late = threading.Event()

    def meet(each, rank):
        if rank == 0:
            late.wait(30)
        elif rank == 8:
            late.set()
        return _meet(each, 2)

    assert together(ranks, meet) == [Met(b"0,1,2,3,4,5,6,7,8")] * 9
    assert store.requests < 9 * 10


def test_ranks_of_different_numbers_wait_for_each_other():
    ranks = _meetings(2)

    def meet(each, rank):
        if rank == 1:
            with pytest.raises(RankLostError, match="rank 1 has not called"):
                _meet(each, 1, check=_impatient(5))
        return _meet(each, 2)

    outcomes = together(ranks, meet)
    assert outcomes == [Met(b"0,1")] * 2
    with pytest.raises(GivenUp, match="rank 1 has not called") as given_up:
        _meet(ranks[0], 1)  # late
    assert given_up.value.early


@pytest.mark.parametrize("leaves", [0, 1])
def test_a_rank_that_comes_late_is_told_why_the_meeting_was_given_up_and_for_what(leaves):
    ranks = _meetings(2)
    together(ranks, lambda each, _: _meet(each, 1))
    with pytest.raises(RankLostError, match="rank 1 has not called"):
        _meet(ranks[leaves], 2, check=_impatient(3), name="a")
    for _ in range(2):  # whenever it asks
        with pytest.raises(GivenUp, match="rank 1 has not called") as given_up:
            _meet(ranks[1 - leaves], 2, name="b")
        assert (given_up.value.name, given_up.value.early) == ("a", True)
    assert together(ranks, lambda each, _: _meet(each, 3)) == [Met(b"0,1")] * 2


@pytest.mark.parametrize("leaves", [0, 2])
def test_a_rank_that_leaves_lets_go_those_that_wait(leaves):
    ranks = _meetings(4)

    def meet(each, rank):
        if rank == 3:
            return None
        return _meet(each, 1, check=_impatient(8) if rank == leaves else _nothing)

    outcomes = together(ranks, meet)
    assert isinstance(outcomes[leaves], RankLostError)
    others = [each for rank, each in enumerate(outcomes[:3]) if rank != leaves]
    assert all(isinstance(each, GivenUp) and not each.early for each in others), outcomes


def test_a_rank_that_would_leave_when_the_first_rank_has_answered_takes_the_answer():
    """All the others go on, and wait for it."""
    ranks = _meetings(2)
    together(ranks, lambda each, _: _meet(each, 1))  # from now on, a check follows the message
    answered = threading.Event()

    def check():
        if answered.wait(30):
            raise KeyboardInterrupt

    def meet(each, rank):
        if rank == 0:
            time.sleep(0.1)  # the other one waits
            met = _meet(each, 2, _each)
            answered.set()
            return met
        return _meet(each, 2, check=check)

    first, late = together(ranks, meet)
    assert first == Met(b"you said 0")
    assert late.answer == b"you said 1"
    assert isinstance(late.error, KeyboardInterrupt)


def test_an_answer_that_fails_fails_the_meeting_on_all():
    ranks = _meetings(3)

    def fail(messages):
        raise KeyError("no plan")

    outcomes = together(ranks, lambda each, _: _meet(each, 1, fail))
    assert isinstance(outcomes[0], KeyError)
    assert all(isinstance(each, GivenUp) and "no plan" in each.why for each in outcomes[1:])
    assert together(ranks, lambda each, _: _meet(each, 2)) == [Met(b"0,1,2")] * 3


@pytest.mark.parametrize("step", [1, 20])
def test_keys_of_meetings_that_were_given_up_do_not_grow(monkeypatch, step):
    monkeypatch.setattr(meetings, "_KEPT", 3)
    store = MemoryStore()
    ranks = _meetings(2, store)
    together(ranks, lambda each, _: _meet(each, 1))
    keys = []
    for number in range(2, 2 + 10 * step, step):
        together(ranks[1:], lambda each, _, number=number: _meet(each, number, check=_impatient(1)))
        together(ranks[:1], lambda each, _, number=number: _meet(each, number))
        keys.append(store.real.num_keys())
    assert keys[-1] <= keys[4], keys


def test_a_store_that_has_outlived_a_job_does_not_fail_the_next_ones_meetings():
    store = MemoryStore()
    for _ in range(2):
        ranks = _meetings(2, store)
        assert together(ranks, lambda each, _: _meet(each, 1)) == [Met(b"0,1")] * 2
        with pytest.raises(RankLostError):
            _meet(ranks[1], 2, check=_impatient(2))


def test_a_store_that_fails_for_a_while_fails_no_meeting(monkeypatch):
    monkeypatch.setattr(meetings, "_STORE_PAUSE", 0.01)
    store = MemoryStore()
    ranks = _meetings(2, store)
    together(ranks, lambda each, _: _meet(each, 1))
    real, fails = store.real, itertools.count()

    class Failing:
        def __getattr__(self, name):
            if next(fails) < 40:
                raise RuntimeError("Connection reset by peer")
            return getattr(real, name)

    store.real = Failing()
    assert together(ranks, lambda each, _: _meet(each, 2)) == [Met(b"0,1")] * 2
    assert next(fails) > 40


def test_a_rank_that_could_not_say_that_it_leaves_says_so_before_the_next_meeting(monkeypatch):
    store = MemoryStore()
    ranks = _meetings(2, store)
    together(ranks, lambda each, _: _meet(each, 1))
    real = store.real

    class Gone:
        def __getattr__(self, name):
            raise RuntimeError("Connection refused")

    store.real = Gone()
    with pytest.raises(RankLostError, match="has not called"):
        _meet(ranks[1], 2, check=_impatient(0))
    store.real = real

    def meet(each, rank):
        if rank == 0:
            with pytest.raises(GivenUp, match="has not called"):
                _meet(each, 2)
        return _meet(each, 3)

    assert together(ranks, meet) == [Met(b"0,1")] * 2


class _Detector:
    """Knows of no loss, until it is told of one."""

    def __init__(self):
        self.lost = []

    def losses(self):
        return list(self.lost)


def test_a_lost_rank_is_named_at_once_if_that_is_certain_and_else_when_it_does_not_return(
    monkeypatch,
):
    now = 100.0
    monkeypatch.setattr(failure_detector.time, "monotonic", lambda: now)
    detector = _Detector()
    watch = RankWait(detector, "a wait", 12.0)
    watch.look()
    detector.lost = [Loss(1, "is silent")]
    for now in (101.0, 112.9):  # noqa: B007 - the clock reads it
        watch.look()
    detector.lost = []
    now = 113.5
    watch.look()  # it is back
    detector.lost = [Loss(1, "is silent")]
    now = 114.0
    watch.look()
    now = 126.0
    with pytest.raises(RankLostError, match="rank 1 is silent"):
        watch.look()
    detector.lost = [Loss(2, "is dead", True)]
    with pytest.raises(RankLostError, match="rank 2 is dead"):
        RankWait(detector, "a wait", 12.0).look()
