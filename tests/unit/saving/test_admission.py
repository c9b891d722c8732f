"""What a call does when saves come faster than they commit; and the saves of one writer: what ``wait()`` waits for."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from dcp_datastates.errors import StorageError
from dcp_datastates.process.futures import AskedFuture
from dcp_datastates.saving import admission
from dcp_datastates.saving.admission import Saves


class _Save:
    """A save that is over after it was waited for ``polls`` times."""

    def __init__(self, polls=1, left_out=False, decided=False):
        self.path, self.doing = "c", "being read"
        self.polls, self.left_out = polls, left_out
        self.committed = Future()
        if decided:
            self.committed.set_result(None)

    @property
    def over(self):
        return self.polls <= 0

    def wait_briefly(self, seconds):
        self.polls -= 1


@pytest.fixture
def enter():
    entered = []

    def enter(*saves):
        entered.extend(saves)
        for save in saves:
            admission.enter(save)
        return saves

    yield enter
    for save in entered:
        save.polls = 0
    assert not admission.in_flight()


def test_saves_are_in_flight_until_they_are_over_the_oldest_first(enter):
    first, second, third = enter(_Save(), _Save(), _Save())
    assert admission.in_flight() == [first, second, third]
    second.polls = 0
    assert admission.in_flight() == [first, third]


@pytest.mark.parametrize("mode", ["wait", "skip"])
def test_with_room_a_call_goes_ahead_immediately_and_leaves_the_others_alone(mode, enter):
    save = enter(_Save(polls=3))[0]
    assert not admission.make_room(2, mode)
    assert save.polls == 3


def test_without_room_a_call_waits_for_as_many_of_the_oldest_as_it_must(enter):
    first, second, third = enter(_Save(polls=3), _Save(polls=2), _Save())
    assert not admission.make_room(2, "wait")
    assert (first.polls, second.polls, third.polls) == (0, 0, 1)


def test_without_room_a_call_is_skipped(enter):
    enter(_Save())
    assert admission.make_room(1, "skip")


@pytest.mark.parametrize("done", [{"left_out": True}, {"decided": True}])
def test_what_takes_no_memory_any_more_takes_no_room(done, enter):
    enter(_Save(**done), _Save())
    assert not admission.make_room(2, "skip")


# ---- the saves of one writer


class _OfWriter:
    def __init__(self, *, own=True, error=None):
        self.own = own
        self.committed = AskedFuture(lambda: None)
        self.over = False
        self.waited = 0
        self._error = error

    def wait(self):
        self.waited += 1
        if self.over:
            return
        self.over = True
        if self._error:
            self.committed.set_exception(self._error)
        else:
            self.committed.set_result(None)


def _added(*saves):
    made = Saves()
    for save in saves:
        made.add(save)
    return made


def test_the_newest_is_the_last_one_added():
    first, second = _OfWriter(), _OfWriter()
    assert Saves().newest is None
    assert _added(first, second).newest is second


def test_wait_waits_for_all_and_for_each_only_once():
    saves = [_OfWriter(), _OfWriter(own=False), _OfWriter()]
    made = _added(*saves)
    made.wait()
    made.wait()
    assert [save.waited for save in saves] == [1, 1, 1]


def test_wait_raises_the_error_of_a_save_of_this_package_and_only_once():
    made = _added(_OfWriter(), _OfWriter(error=StorageError(5, "why")))
    with pytest.raises(StorageError, match="why"):
        made.wait()
    made.wait()


def test_an_error_is_raised_though_saves_were_added_after_it():
    failed = _OfWriter(error=StorageError(5, "why"))
    made = _added(failed)
    failed.wait()
    made.add(_OfWriter())
    with pytest.raises(StorageError, match="why"):
        made.wait()


def test_an_error_that_the_caller_knows_or_is_told_elsewhere_is_not_raised():
    asked, waited_for = (_OfWriter(own=each, error=StorageError(5, "")) for each in (True, False))
    made = _added(asked, waited_for)
    asked.wait()
    assert isinstance(asked.committed.exception(), StorageError)
    made.wait()


def test_saves_whose_outcome_is_known_are_let_go():
    done = _OfWriter()
    done.wait()
    made = _added(done, _OfWriter())
    made.wait()
    assert done.waited == 1
