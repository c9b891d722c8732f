"""What a call does when saves come faster than they commit."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from dcp_datastates.saving import admission
from dcp_datastates.saving.call import DROPPED, SKIPPED


class _Save:
    """A save that is over after it was waited for ``polls`` times."""

    def __init__(self, order=0, polls=1, begun=False, left_out=0, decided=False, reads=None):
        self.call = SimpleNamespace(order=order)
        self.path, self.doing = "c", "being read"
        self.begun, self.left_out, self.reads = begun, left_out, reads
        self.polls = polls
        self.committed = Future()
        if decided:
            self.committed.set_result(None)

    @property
    def over(self):
        return self.polls <= 0

    def wait_briefly(self, seconds):
        self.polls -= 1

    def leave_out(self, why):
        if not self.begun:
            self.left_out = why
        return not self.begun


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


@pytest.mark.parametrize("mode", ["wait", "skip", "newest"])
def test_with_room_a_call_goes_ahead_at_once_and_leaves_the_others_alone(mode, enter):
    save = enter(_Save(polls=3))[0]
    assert admission.make_room(2, mode) == 0
    assert (save.polls, save.left_out) == (3, 0)


def test_without_room_a_call_waits_for_as_many_of_the_oldest_as_it_must(enter):
    first, second, third = enter(_Save(polls=3), _Save(polls=2), _Save())
    assert admission.make_room(2, "wait") == 0
    assert (first.polls, second.polls, third.polls) == (0, 0, 1)


def test_without_room_a_call_is_skipped(enter):
    save = enter(_Save())[0]
    assert admission.make_room(1, "skip") == SKIPPED
    assert save.left_out == 0


@pytest.mark.parametrize("done", [{"left_out": SKIPPED}, {"decided": True}])
@pytest.mark.parametrize("mode", ["skip", "newest"])
def test_what_takes_no_memory_any_more_takes_no_room(mode, done, enter):
    waiting = enter(_Save(**done), _Save())[1]
    assert admission.make_room(2, mode) == 0
    assert waiting.left_out == 0


def test_the_newest_takes_the_place_of_the_oldest_that_has_not_begun(enter):
    saves = enter(_Save(begun=True), _Save(), _Save())
    assert admission.make_room(3, "newest") == 0
    assert [save.left_out for save in saves] == [0, DROPPED, 0]


def test_the_newest_goes_ahead_though_all_others_have_begun(enter):
    saves = enter(_Save(begun=True), _Save(begun=True))
    assert admission.make_room(2, "newest") == 0
    assert [save.left_out for save in saves] == [0, 0]


def test_only_the_reads_of_earlier_calls_are_awaited(enter):
    read, unread = Future(), Future()
    read.set_result(None)
    own = _Save(order=2)
    enter(
        _Save(order=1, reads=SimpleNamespace(captured=read)),
        _Save(order=0),  # its planner resolves its data in place
        own,
        _Save(order=3, reads=SimpleNamespace(captured=unread)),
    )
    admission.await_reads(own)
