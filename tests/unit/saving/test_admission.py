"""What a call does when saves come faster than they commit."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from dcp_datastates.saving import admission


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
