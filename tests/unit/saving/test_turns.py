"""The order of DCP's threads: one at a time, as the saves were called."""

from __future__ import annotations

import threading

import pytest

from dcp_datastates.saving import turns
from dcp_datastates.saving.turns import Turn


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(turns, "_BEGIN_SECONDS", 0.0)


@pytest.fixture
def order():
    return []


def _thread(turn, order, ready, go_on):
    def run():
        turn.come()
        ready.set()
        go_on.wait(30)
        turn.wait()
        order.append(turn)
        turn.end()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_turn_is_kept_for_a_thread_that_has_come_and_takes_its_time(order):
    """Longer than a thread may take to come: copies on a device may take minutes."""
    first, second = Turn(), Turn()
    ready, go_on = threading.Event(), threading.Event()
    slow = _thread(first, order, ready, go_on)
    assert ready.wait(30)
    go_on_at_once = threading.Event()
    go_on_at_once.set()
    quick = _thread(second, order, threading.Event(), go_on_at_once)
    quick.join(0.5)
    assert order == []
    go_on.set()
    for thread in (slow, quick):
        thread.join(30)
    assert order == [first, second]


def test_a_thread_that_lives_on_after_the_outcome_lets_the_next_go(order):
    """A callback of DCP's future runs in DCP's thread, when DCP is done with the save: it may wait for the next one."""
    first, second = Turn(), Turn()
    ready, end = threading.Event(), threading.Event()

    def stay():
        first.wait()
        ready.set()
        end.wait(60)

    staying = threading.Thread(target=stay)
    staying.start()
    assert ready.wait(30)
    go_on = threading.Event()
    go_on.set()
    following = _thread(second, order, threading.Event(), go_on)
    following.join(0.5)
    assert order == []
    first.told(0.0)
    following.join(30)
    assert order == [second]
    end.set()
    staying.join(30)


def test_a_turn_that_nobody_comes_for_is_passed_over(order):
    Turn()
    second = Turn()
    go_on = threading.Event()
    go_on.set()
    _thread(second, order, threading.Event(), go_on).join(30)
    assert order == [second]
