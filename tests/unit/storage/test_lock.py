"""Locks on directories: who is in flight, seen by several at once."""

from __future__ import annotations

import fcntl
import os
import threading
import time

import pytest

from dcp_datastates.storage.lock import Hold, asking, in_flight


def test_a_hold_is_seen_until_it_is_released(tmp_path):
    assert in_flight(tmp_path) is False
    hold = Hold(tmp_path)
    assert in_flight(tmp_path) is True
    hold.release()
    hold.release()
    assert in_flight(tmp_path) is False


def test_those_who_ask_at_once_do_not_take_each_other_for_a_hold(tmp_path):
    """Ranks clean up at the same moment: each would have left its files to the others."""
    start, seen = threading.Barrier(4), []

    def ask():
        start.wait()
        seen.extend(in_flight(tmp_path) for _ in range(2000))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8000
    assert not any(seen)


@pytest.mark.parametrize("how", [fcntl.LOCK_SH, fcntl.LOCK_EX])
def test_a_hold_waits_for_those_who_only_ask(how, tmp_path):
    asking = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(asking, how)  # what in_flight() does, for a moment
    timer = threading.Timer(0.2, os.close, [asking])
    timer.start()
    hold = Hold(tmp_path)
    timer.join()
    assert in_flight(tmp_path) is True
    hold.release()
    assert in_flight(tmp_path) is False


def test_a_hold_on_a_directory_that_is_removed_first_is_no_hold(tmp_path):
    folder = tmp_path / "attempt"
    assert Hold.on(folder) is None
    folder.mkdir()
    with asking(folder) as held:  # as one who is about to remove it
        assert held is False
        found = []
        claiming = threading.Thread(target=lambda: found.append(Hold.on(folder)))
        claiming.start()
        time.sleep(0.2)
        folder.rmdir()
        (tmp_path / "other").mkdir()
        (tmp_path / "other").rename(folder)  # of the same name, and another
    claiming.join()
    assert found == [None]
    hold = Hold.on(folder)
    assert hold is not None
    assert in_flight(folder)
    hold.release()
