"""Who is lost, and who only takes his time: two ranks' detectors in one process, over a store in a file."""

from __future__ import annotations

import dataclasses
import os
import threading
import time

import pytest
import torch.distributed as dist

from dcp_datastates.commit import failure_detector as heart_module
from dcp_datastates.commit import processes
from dcp_datastates.commit.beats import Beat, Loss
from dcp_datastates.commit.decision import Decision, Outcome
from dcp_datastates.commit.decision_log import DecisionLog
from dcp_datastates.commit.failure_detector import FailureDetector
from dcp_datastates.commit.protocol import Said
from dcp_datastates.commit.pulse import Pulse
from dcp_datastates.commit.rank_set import RankSet


@pytest.fixture(autouse=True)
def _hurried(monkeypatch):
    monkeypatch.setattr(heart_module, "SILENCE_SECONDS", 1.5)
    monkeypatch.setattr(heart_module, "_UNSEEN_SECONDS", 4.0)
    monkeypatch.setattr(heart_module, "_ACTIVE_SECONDS", 0.2)
    monkeypatch.setattr(heart_module, "_IDLE_SECONDS", 0.4)


@pytest.fixture
def detectors(tmp_path):
    """Makes detectors, rank by rank, each with a store of its own; ends them."""
    made = []

    def make(rank, world=2, status=Beat):
        base = dist.FileStore(str(tmp_path / "store"), world)
        rank_set = RankSet(rank, tuple(range(world)), base)
        detector = FailureDetector(rank_set, rank_set.connect("commit"), status)
        detector.quicken()
        made.append(detector)
        return detector

    yield make
    for detector in made:
        detector.close()


def _until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.02)


def _elsewhere(monkeypatch):
    """As on another machine: nobody can see whether the process is there."""
    monkeypatch.setattr(heart_module, "is_gone", lambda who: False)


def test_a_silent_rank_is_lost_and_named_and_is_not_when_it_beats_again(detectors, monkeypatch):
    _elsewhere(monkeypatch)
    first, second = detectors(0), detectors(1)
    _until(lambda: all(watched.value for watched in first._watched.values()))
    assert first.losses() == []
    second.close()
    _until(first.losses)
    (loss,) = first.losses()
    assert str(loss).startswith("rank 1 has been silent")
    assert not loss.certain
    detectors(1)
    _until(lambda: not first.losses())


def test_the_others_hear_from_the_coordinator_who_is_lost(detectors, monkeypatch):
    _elsewhere(monkeypatch)
    first, second, third = (detectors(rank, world=3) for rank in range(3))
    _until(lambda: all(watched.value for watched in first._watched.values()))
    second.close()
    _until(third.losses)
    assert [loss.rank for loss in third.losses()] == [1]


def test_a_dead_process_on_this_machine_is_seen_at_once(detectors, tmp_path):
    first = detectors(0)
    child = os.fork()
    if child == 0:
        store = RankSet(1, (0, 1), dist.FileStore(str(tmp_path / "store"), 2)).connect("commit")
        store.set("who/1", processes.identity())
        store.set("beat/1", Beat().encode(1))
        os._exit(0)
    os.waitpid(child, 0)
    began = time.monotonic()
    _until(first.losses)
    assert time.monotonic() - began < 1.4, "it waited for silence"
    (loss,) = first.losses()
    assert loss.certain
    assert f"process {child}" in str(loss)
    assert "is dead" in str(loss)


def test_another_machines_process_is_never_called_dead():
    host, _, pid, started = processes.identity().split("|")
    assert not processes.is_gone("|".join([host, "another boot", "1", "0"]))
    assert processes.is_gone("|".join([host, processes._boot(), pid, "0"])), "pid reused"
    assert not processes.is_gone("|".join([host, processes._boot(), pid, started]))
    assert not processes.is_gone("|".join([host, "", "999999", "0"]))


def test_a_rank_never_heard_of_has_longer_as_it_may_not_save_yet(detectors):
    first = detectors(0)
    time.sleep(2.2)
    assert first.losses() == []
    _until(first.losses)


def test_in_a_round_a_rank_never_heard_of_is_silent_like_any_other(detectors):
    first = detectors(0)
    first.follow(0)
    began = time.monotonic()
    _until(first.losses)
    assert time.monotonic() - began < 3.5


def test_a_rank_without_progress_is_stalled_only_while_it_owes_a_vote(detectors):
    beats = {"now": Beat(voted=4, progress=7, doing="flushing (save 5)")}
    first = detectors(0)
    detectors(1, status=lambda: beats["now"])
    first.follow(5)
    _until(lambda: first.stalled(5, 1.0))
    (loss,) = first.stalled(5, 1.0)
    assert "rank 1 is alive, but has made no progress" in str(loss)
    assert "flushing (save 5)" in str(loss)
    assert first.stalled(4, 1.0) == [], "it has voted in that one"
    beats["now"] = Beat(voted=4, progress=8, doing="flushing (save 5)")
    _until(lambda: not first.stalled(5, 1.0))


class _StandsStill:
    """What a rank says of itself, until its Python stands still: then its detector's thread waits here."""

    def __init__(self):
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.stands = threading.Event()

    def __call__(self):
        if not self.goes_on.is_set():
            self.stands.set()
        self.goes_on.wait()
        return Beat()


@pytest.mark.parametrize("standing", [0, 1])
def test_a_rank_whose_python_stands_still_is_stalled_and_not_lost(detectors, monkeypatch, standing):
    _elsewhere(monkeypatch)
    status = _StandsStill()
    both = [detectors(rank, status=status if rank == standing else Beat) for rank in (0, 1)]
    watching = both[1 - standing]
    watching.follow(0)
    _until(lambda: watching._watched[standing].pulses > 1)
    status.goes_on.clear()
    status.stands.wait(10)
    deadline = time.monotonic() + 2 * heart_module.SILENCE_SECONDS
    while time.monotonic() < deadline:
        assert watching.losses() == []
        time.sleep(0.05)
    assert [loss.rank for loss in watching.stalled(0, 1.0)] == [standing]
    status.goes_on.set()


@pytest.mark.parametrize("standing", [0, 1])
def test_where_no_pulse_comes_a_rank_whose_python_stands_still_is_given_more_time(
    detectors, monkeypatch, standing
):
    _elsewhere(monkeypatch)
    monkeypatch.setattr(heart_module, "Pulse", _NoPulse)
    status = _StandsStill()
    both = [detectors(rank, status=status if rank == standing else Beat) for rank in (0, 1)]
    watching = both[1 - standing]
    _until(lambda: watching._watched[standing].heard)
    status.goes_on.clear()
    status.stands.wait(10)
    deadline = time.monotonic() + 2 * heart_module.SILENCE_SECONDS
    while time.monotonic() < deadline:
        assert watching.losses() == []
        time.sleep(0.05)
    _until(watching.losses)
    status.goes_on.set()


class _NoPulse(Pulse):
    """The network carries no datagrams."""

    def counts(self):
        return {}


def test_a_rank_whose_python_stands_still_for_too_long_is_lost(detectors, monkeypatch):
    _elsewhere(monkeypatch)
    monkeypatch.setattr(heart_module, "_HELD_SECONDS", 2.0)
    status = _StandsStill()
    first, _second = detectors(0), detectors(1, status=status)
    _until(lambda: first._watched[1].pulses > 1)
    status.goes_on.clear()
    _until(first.losses)
    status.goes_on.set()
    _until(lambda: not first.losses())


def test_a_pulse_that_is_closed_at_the_end_of_the_process_ends_no_heart(detectors, monkeypatch):
    made = []
    real = heart_module.Pulse

    def make(*arguments):
        made.append(real(*arguments))
        return made[-1]

    monkeypatch.setattr(heart_module, "Pulse", make)
    first, second = detectors(0), detectors(1)
    _until(lambda: first._watched[1].pulses > 1)
    for pulse in made:
        pulse.close()
    beats = first._count
    _until(lambda: first._count > beats + 3)
    assert not first.misses_store
    assert second._thread.is_alive()


def test_a_rank_that_misses_the_store_does_not_show_a_pulse(detectors, monkeypatch):
    _elsewhere(monkeypatch)
    first, second = detectors(0), detectors(1)
    _until(lambda: first._watched[1].pulses > 1)

    def fails(*_):
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(second._store, "set", fails)
    _until(first.losses)
    assert "rank 1 has been silent" in str(first.losses()[0])


def test_what_went_before_a_round_does_not_count_against_it(detectors):
    first = detectors(0)
    detectors(1)
    time.sleep(1.5)
    first.follow(0)
    assert first.stalled(0, 1.0) == []


def test_what_the_coordinator_decided_in_the_followed_round_is_seen(detectors, tmp_path):
    ended = -1

    def status():
        return Beat(ended=ended)

    first, second = detectors(0, status=status), detectors(1)
    second.follow(3)
    _until(lambda: second.losses() == [] and first.ended(0) == [])
    assert second.said is None
    log = DecisionLog(
        RankSet(1, (0, 1), dist.FileStore(str(tmp_path / "store"), 2)).connect("commit")
    )
    log.note(3, Decision(Outcome.COMMITTED))
    log.note(4, Decision(Outcome.FAILED))
    assert second.said is None, "the coordinator has not ended it"
    ended = 3
    _until(lambda: second.said == Said(Decision(Outcome.COMMITTED)))
    second.follow(4)
    ended = 4
    _until(lambda: second.said == Said(Decision(Outcome.FAILED)))
    second.follow(5)
    ended = 6
    _until(lambda: second.said == Said(None))
    second.follow(None)
    assert second.said is None


def test_the_coordinator_sees_which_ranks_have_ended_a_round(detectors):
    first = detectors(0)
    detectors(1, status=lambda: Beat(ended=7))
    _until(lambda: first.ended(7) == [1])
    assert first.ended(8) == []


def test_close_ends_the_thread(detectors):
    first = detectors(0)
    first.close()
    assert not first._thread.is_alive()


def test_beats_travel():
    losses = [Loss(3, 'is dead: "quoted"', True), Loss(5, "has been silent")]
    beat = Beat(
        3,
        7,
        "reading | x",
        4,
        2,
        [list(dataclasses.astuple(loss)) for loss in losses],
        ["::1", 5, 7],
    )
    found = Beat.decode(beat.encode(9).encode())
    assert found == beat
    assert [Loss(*loss) for loss in found.lost] == losses


def test_a_listener_that_raises_does_not_end_the_heart(detectors, monkeypatch):
    first = detectors(0)
    told = []

    def listener(losses):
        told.append(losses)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(first, "losses", lambda: [Loss(1, "is lost")])
    first.listen(listener)
    _until(lambda: len(told) >= 2)


def test_the_coordinator_does_not_tell_the_others_that_it_missed_the_store(detectors, monkeypatch):
    first, second = detectors(0), detectors(1)
    _until(lambda: second.said_by_coordinator)
    real, fails = first._store.set, [True]

    def failing_once(key, value):
        if fails:
            fails.clear()
            raise RuntimeError("Connection reset by peer")
        real(key, value)

    monkeypatch.setattr(first._store, "set", failing_once)
    _until(lambda: first.misses_store)
    heard = []
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        heard += second.losses()
        time.sleep(0.02)
    assert not first.misses_store
    assert heard == []
