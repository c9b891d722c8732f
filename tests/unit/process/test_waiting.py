"""Waits that last say so, and are given up without progress: by a clock of the test's own."""

import logging
import time

import pytest
from support.state.checkpoints import raises

from dcp_datastates.errors import SaveStalledError
from dcp_datastates.process import waiting
from dcp_datastates.process.ending import Phase
from dcp_datastates.process.waiting import Wait

logger = logging.getLogger("dcp_datastates.test")


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_only_time_without_progress_counts():
    clock = Clock()
    wait = Wait(logger, "a step", 10.0, clock)
    for moved in range(50):
        clock.now += 9
        wait.look("reads", moved)
    clock.now += 9
    wait.look("reads", moved)
    clock.now += 1
    with raises(SaveStalledError, "a step has waited for 460 s, the last 10 s", "reads"):
        wait.look("reads", moved)


@pytest.mark.parametrize("patience", [0, 100])
def test_without_any_progress_the_time_counts_from_the_start_or_after_patience(patience):
    clock = Clock()
    wait = Wait(logger, "a step", 10.0, clock, patience=float(patience))
    clock.now += patience + 9
    wait.look("reads")
    clock.now += 1
    with raises(SaveStalledError, f"{patience + 10} s, the last 10 s"):
        wait.look("reads")


def test_at_the_end_of_the_process_waits_for_storage_are_given_up(monkeypatch):
    clock = Clock()
    wait = Wait(logger, "a save", 1000.0, clock)

    def is_over(since, phase):
        assert phase is Phase.GIVE_UP
        return since + 10 < time.monotonic()

    wait.look("its files", 0, storage=True)
    monkeypatch.setattr(waiting, "patience_is_over", is_over)
    clock.now += 9
    wait.look("its files", 0, storage=True)
    clock.now += 9
    wait.look("its files", 1, storage=True)
    clock.now += 11
    wait.look("its plan", 1)
    with raises(SaveStalledError, "a save has waited for 29 s, the last 11 s", "the process ends"):
        wait.look("its files", 1, storage=True)


def test_a_wait_of_five_seconds_is_logged_and_then_ever_more_rarely(caplog):
    clock = Clock()
    wait = Wait(logger, "a step", 1000.0, clock)
    for _ in range(100):
        clock.now += 1
        wait.look("its reads")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 5  # at 5, 10, 20, 40, 80
    assert lines[0] == "a step has waited for 5 s: its reads"
