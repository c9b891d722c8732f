"""Which rank is lost, and which only takes its time: two ranks' detectors in one process, over a store in a file."""

import gc
import os
import threading

import pytest
import torch.distributed as dist
from support.jobs.threads import MemoryStore, rank_set, together
from support.waiting import await_that

from dcp_datastates.process import forks
from dcp_datastates.ranks import failure_detector as detector_module
from dcp_datastates.ranks.failure_detector import Beat, FailureDetector, Loss
from dcp_datastates.ranks.incarnation import identity, is_gone, is_near
from dcp_datastates.ranks.rank_set import of_store

SILENCE = 1.5
NEVER = 1e9
NAME = "dcp_datastates-heartbeat"


@pytest.fixture(autouse=True)
def _hurried(monkeypatch):
    monkeypatch.setattr(detector_module, "SILENCE_SECONDS", SILENCE)
    monkeypatch.setattr(detector_module, "_UNSEEN_SECONDS", 4.0)
    monkeypatch.setattr(detector_module, "_ACTIVE_SECONDS", 0.2)
    monkeypatch.setattr(detector_module, "_IDLE_SECONDS", 0.4)


class _Status:
    """What a rank says of itself, each time that it beats; :meth:`stand_still` has its Python stand still there."""

    def __init__(self, beat=None):
        self.beat = beat or Beat(ended=0)
        self.beats = 0
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._stands = threading.Event()

    def __call__(self):
        self.beats += 1
        if not self._goes_on.is_set():
            self._stands.set()
        self._goes_on.wait()
        return self.beat

    def await_beats(self, count):
        """That many more."""
        enough = self.beats + count
        await_that(lambda: self.beats >= enough)

    def stand_still(self):
        self._goes_on.clear()
        assert self._stands.wait(10)

    def go_on(self):
        self._goes_on.set()


class _Detectors:
    """Made rank by rank, each with a connection of its own."""

    def __init__(self, path):
        self._path = path
        self.made = []
        self.stores = {}
        self._rank_sets = {}

    def rank_set(self, rank, world=2):
        if rank not in self._rank_sets:
            store = dist.FileStore(str(self._path), world)
            self._rank_sets[rank] = of_store(rank, tuple(range(world)), store)
        return self._rank_sets[rank]

    def __call__(self, rank, world=2, status=None):
        rank_set = self.rank_set(rank, world)
        self.stores[rank] = rank_set.connect("commit")
        detector = FailureDetector(rank_set, self.stores[rank], status or _Status())
        detector.save_started()
        self.made.append(detector)
        return detector


@pytest.fixture
def detectors(tmp_path):
    detectors = _Detectors(tmp_path / "store")
    yield detectors
    for detector in detectors.made:
        detector.close()
    # What is left of them are cycles, which hold threads that ask a store whose file is about to go.
    vars(detectors).clear()
    gc.collect()


def _elsewhere(monkeypatch):
    """As on another machine: nothing tells whether the process is there."""
    monkeypatch.setattr(detector_module, "is_gone", lambda who: False)


def test_a_silent_rank_is_lost_and_named_and_is_not_when_it_beats_again(detectors, monkeypatch):
    _elsewhere(monkeypatch)
    first, second = detectors(0), detectors(1)
    await_that(lambda: first.ended(0) == {1: ""})
    assert first.losses() == []
    second.close()
    await_that(first.losses)
    (loss,) = first.losses()
    assert str(loss).startswith("rank 1 has been silent")
    assert not loss.certain
    detectors(1)
    await_that(lambda: not first.losses())


def test_a_save_that_begins_gives_a_silent_rank_time_to_be_heard_again(detectors, monkeypatch):
    """It was stopped, say, and comes back with this save."""
    _elsewhere(monkeypatch)
    first, second = detectors(0), detectors(1)
    await_that(lambda: first.ended(0) == {1: ""})
    second.close()
    await_that(first.losses)
    first.save_ended()  # the save that failed for it
    first.save_started()
    assert first.losses() == []
    await_that(first.losses)


def test_time_before_a_round_is_no_time_without_progress(detectors):
    """The detector looked long ago when the round begins: there was no save."""
    first = detectors(0)
    detectors(1)
    await_that(lambda: first.ended(0) == {1: ""})
    first.close()  # the test looks in its place
    first._interval = 60.0
    first._looked_at -= 60
    first.expect_votes(True)
    first._look()
    assert first.stalled(30, 1) == []


def test_the_others_hear_from_the_coordinator_who_is_lost(detectors, monkeypatch):
    _elsewhere(monkeypatch)
    first, second, third = (detectors(rank, world=3) for rank in range(3))
    await_that(lambda: sorted(first.ended(0)) == [1, 2])
    second.close()
    await_that(third.losses)
    assert [loss.rank for loss in third.losses()] == [1]


def test_a_dead_process_on_this_machine_needs_no_silence_to_be_seen(detectors, monkeypatch):
    monkeypatch.setattr(detector_module, "SILENCE_SECONDS", NEVER)
    monkeypatch.setattr(detector_module, "_UNSEEN_SECONDS", NEVER)
    first = detectors(0)
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(forks, "_in_child", False)  # a rank of its own
        detectors(1)
        await_that(lambda: detectors.made[-1].ended(0) == {0: ""})
        os._exit(0)
    os.waitpid(child, 0)
    await_that(first.losses)
    (loss,) = first.losses()
    assert loss.certain
    assert f"process {child}" in str(loss)
    assert "is dead" in str(loss)


def test_another_machines_process_is_never_called_dead_nor_near():
    """Machines that were copied while they ran share all but the name."""
    host, boot, pid, started = identity().split("|")

    def who(host=host, boot=boot, pid=pid, started=started):
        return "|".join([host, boot, pid, started])

    assert is_gone(who(started="0")), "pid reused"
    assert not is_gone(who())
    assert is_near(who())
    assert not is_near(who(host=host + "-2"))
    for elsewhere in (
        {"host": host + "-2"},
        {"boot": "another boot", "pid": "1"},
        {"boot": "", "pid": "999999"},
    ):
        assert not is_gone(who(**elsewhere, started="0"))


def test_a_rank_never_heard_of_has_longer_as_it_may_not_save_yet(detectors, monkeypatch):
    monkeypatch.setattr(detector_module, "_UNSEEN_SECONDS", NEVER)
    status = _Status()
    first = detectors(0, status=status)
    await_that(lambda: first.stalled(2 * SILENCE))
    assert first.losses() == []
    monkeypatch.setattr(detector_module, "_UNSEEN_SECONDS", SILENCE)
    await_that(first.losses)


def test_in_a_round_a_rank_never_heard_of_is_silent_like_any_other(detectors, monkeypatch):
    monkeypatch.setattr(detector_module, "_UNSEEN_SECONDS", NEVER)
    first = detectors(0)
    first.expect_votes(True)
    await_that(first.losses)


def test_a_rank_without_progress_is_stalled_only_while_it_owes_a_vote(detectors):
    status = _Status(Beat(voted=4, progress=7, doing="flushing (save 5)"))
    first = detectors(0)
    detectors(1, status=status)
    first.expect_votes(True)
    await_that(lambda: first.stalled(1.0, 5))
    (loss,) = first.stalled(1.0, 5)
    assert "rank 1 has made no progress" in str(loss)
    assert "flushing (save 5)" in str(loss)
    assert first.stalled(1.0, 4) == [], "it has voted in that one"
    status.beat = Beat(voted=4, progress=8, doing="flushing (save 5)")
    await_that(lambda: not first.stalled(1.0, 5))


@pytest.mark.parametrize("standing", [0, 1])
def test_a_rank_whose_python_stands_still_for_too_long_is_lost_until_it_goes_on(
    detectors, monkeypatch, standing
):
    _elsewhere(monkeypatch)
    statuses = [_Status(), _Status()]
    both = [detectors(rank, status=statuses[rank]) for rank in (0, 1)]
    watching, status = both[1 - standing], statuses[standing]
    for beating in (*statuses, *statuses):  # it is known by two beats
        beating.await_beats(2)
    status.stand_still()
    await_that(lambda: [loss.rank for loss in watching.losses()] == [standing])
    status.go_on()
    await_that(lambda: not watching.losses())


def test_a_rank_that_misses_the_store_is_silent(detectors, monkeypatch):
    _elsewhere(monkeypatch)
    first, _second = detectors(0), detectors(1)
    await_that(lambda: first.ended(0) == {1: ""})

    def fails(*_):
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(detectors.stores[1], "set", fails)
    await_that(first.losses)
    assert "rank 1 has been silent" in str(first.losses()[0])


def test_what_went_before_a_round_does_not_count_against_it(detectors):
    first = detectors(0)
    detectors(1)
    await_that(lambda: first.stalled(1.0))
    first.expect_votes(True)
    assert first.stalled(1.0, 1) == []


@pytest.mark.parametrize("watching", [0, 1])
def test_which_ranks_have_ended_a_round_is_seen(detectors, watching):
    ends = _Status(Beat(ended=7, gave_up="it is late"))
    watches = [detectors(rank, status=None if rank == watching else ends) for rank in (0, 1)]
    await_that(lambda: watches[watching].ended(7) == {1 - watching: "it is late"})
    assert watches[watching].ended(8) == {}


def test_close_ends_the_thread(detectors):
    first = detectors(0)
    assert NAME in [thread.name for thread in threading.enumerate()]
    first.close()
    assert NAME not in [thread.name for thread in threading.enumerate()]


def test_beats_travel():
    losses = [Loss(3, 'is dead: "quoted"', True), Loss(5, "has been silent")]
    beat = Beat(3, 7, "reading | x", 4, 6, 2, "", 1, losses)
    assert Beat.decode(beat.encode(9).encode()) == beat


def test_a_beat_lists_a_few_of_the_lost_and_counts_the_others():
    losses = [Loss(rank, "has been silent") for rank in range(1, 2049)]
    beat = Beat().with_losses(losses)
    assert len(beat.encode(1)) < 1000
    found = Beat.decode(beat.encode(1).encode())
    assert found.lost[:8] == losses[:8]
    assert sum(loss.count for loss in found.lost) == 2048
    assert str(Loss.error_of(found.lost)) == str(Loss.error_of(losses))
    assert "and 2045 more ranks" in str(Loss.error_of(losses))


def test_the_coordinator_reads_all_beats_by_one_request(monkeypatch):
    world = 200
    store = MemoryStore()
    ranks = rank_set(world, store)
    incarnations = [each.incarnation for each in ranks]
    assert together(incarnations, lambda each, _: each.await_known(30)) == [True] * world
    assert all(each.await_all(30) for each in incarnations)
    detectors = [FailureDetector(each, each.connect("commit"), Beat) for each in ranks]
    for late in (False, True):  # at first the others have no beats yet
        store.requests = 0
        detectors[0]._look()
        assert store.requests <= 2, "a request for each rank"
        assert [rank for rank in detectors[0].absent(0, own=True) if late] == []
        for detector in detectors[1:]:
            detector._beat()
    assert list(detectors[0].ended(-1)) == list(range(1, world))
    assert not detectors[0].losses()


def test_the_beats_of_jobs_that_were_killed_do_not_add_up():
    store, keys = MemoryStore(), []
    for _ in range(4):
        ranks = rank_set(3, store)
        incarnations = [each.incarnation for each in ranks]
        assert together(incarnations, lambda each, _: each.await_known(30)) == [True] * 3
        assert all(each.await_all(30) for each in incarnations)
        for each in ranks:
            detector = FailureDetector(each, each.connect("commit/1"), Beat)
            detector._beat()
        keys.append(store.real.num_keys())
    assert keys == keys[:1] * 4


def test_a_listener_that_raises_does_not_end_the_heart(detectors, monkeypatch):
    first = detectors(0)
    told = []

    def listener(losses):
        told.append(losses)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(first, "losses", lambda: [Loss(1, "is lost")])
    first.save_started(listener)
    await_that(lambda: len(told) >= 2)


def test_the_coordinator_does_not_tell_the_others_that_it_missed_the_store(detectors, monkeypatch):
    other = _Status()
    first, second = detectors(0), detectors(1, status=other)
    await_that(lambda: second.ended(0) == {0: ""})
    store, fails = detectors.stores[0], [True]
    real = store.set

    def failing_once(key, value):
        if fails:
            fails.clear()
            raise RuntimeError("Connection reset by peer")
        real(key, value)

    monkeypatch.setattr(store, "set", failing_once)
    await_that(lambda: first.misses_store)
    for _ in range(6):
        assert second.losses() == []
        other.await_beats(1)
    assert not first.misses_store
