"""A path is checked before anything is written there; what is interrupted in the training thread leaves nothing behind:
no gate, no turn, no host memory. And what a call does when saves come faster than they commit; what a writer's
``wait()`` waits for, and which errors it raises.
"""

import contextlib
from concurrent.futures import Future

import pytest
import torch
from support.crashes.residue import Residue, assert_nothing_left
from support.state.checkpoints import CACHE, async_save, load
from support.state.loops import owned

import dcp_datastates
from dcp_datastates.config import WriterConfig
from dcp_datastates.errors import (
    CheckpointSupersededError,
    ConfigurationError,
    StorageError,
)
from dcp_datastates.process.futures import SharedFuture
from dcp_datastates.saving import start
from dcp_datastates.saving.start import Saves, directories_to_sync, writable
from dcp_datastates.staging import deferred_reads, step_gate
from dcp_datastates.storage.attempt import Attempt


def _interrupt(*_):
    raise KeyboardInterrupt


gate = step_gate.gate


def _interrupt_behind_the_gate(reads):
    gate(reads)
    raise KeyboardInterrupt


PLACES = {
    "the state is staged": (deferred_reads, "portions", _interrupt),
    "the step is held back": (step_gate, "gate", _interrupt_behind_the_gate),
    "the read window is armed": (step_gate, "arm_backward", _interrupt),
    "the save is in flight": (start, "enter", _interrupt),
}


def _own(state, path):
    dcp_datastates.async_save(state, path, host_cache_size=CACHE).result(30)


def _by_dcp(state, path):
    async_save(state, path).result(30)


@pytest.mark.parametrize("call", [_own, _by_dcp])
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_in_the_call_holds_no_step_and_no_later_save(
    place, call, tmp_path, monkeypatch
):
    state, optimizer = owned(1 << 20)
    for each in (_own, _by_dcp):
        each(state, tmp_path / "before")
    load({"w": torch.zeros(1 << 20)}, tmp_path / "before")
    before = Residue.now()
    with monkeypatch.context() as patch:
        patch.setattr(*PLACES[place])
        with contextlib.suppress(KeyboardInterrupt):
            call(state, tmp_path / "interrupted")
            raise AssertionError("it was not interrupted")
    assert not step_gate._gated, "a step would wait for reads that never come"
    optimizer.step()
    call(state, tmp_path / "after")
    assert torch.equal(load({"w": torch.zeros(1 << 20)}, tmp_path / "after")["w"], state["w"])
    assert_nothing_left(before)


CONFIG = WriterConfig(64 << 20)


def test_a_process_alone_is_told_at_once_and_ranks_are_told_together_later(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="is a file"):
        writable(tmp_path / "file" / "c", CONFIG, alone=True)
    assert writable(tmp_path / "file" / "c", CONFIG, alone=False) == tmp_path / "file" / "c"


def test_what_is_no_path_is_refused_whoever_asks():
    for alone in (True, False):
        with pytest.raises(ConfigurationError, match="names no bucket"):
            writable("s3:///c", CONFIG, alone)


def test_a_folder_that_the_coordinator_has_made_is_shared(tmp_path):
    assert str(tmp_path) in directories_to_sync(tmp_path, rank=1)


def test_a_folder_that_this_rank_does_not_see_is_refused_and_nothing_is_left_of_it(tmp_path):
    folder = tmp_path / "c" / "attempt"
    with pytest.raises(ConfigurationError, match=r"rank 3 on .* does not see .*attempt"):
        directories_to_sync(folder, rank=3)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_job_has_removed_is_no_folder_that_is_not_shared(tmp_path):
    mine, newer = Attempt(1, 1), Attempt(1, 2)
    (tmp_path / newer.name).mkdir()
    with pytest.raises(CheckpointSupersededError, match="another job saves to the same path"):
        directories_to_sync(tmp_path / mine.name, rank=1)
    assert [each.name for each in tmp_path.iterdir()] == [newer.name]
    # An older one says nothing: every save of one job has that beside it.
    with pytest.raises(ConfigurationError, match="does not see"):
        directories_to_sync(tmp_path / Attempt(1, 3).name, rank=1)


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
            start.enter(save)
        return saves

    yield enter
    for save in entered:
        save.polls = 0
    assert not start.in_flight()


def test_saves_are_in_flight_until_they_are_over_the_oldest_first(enter):
    first, second, third = enter(_Save(), _Save(), _Save())
    assert start.in_flight() == [first, second, third]
    second.polls = 0
    assert start.in_flight() == [first, third]


@pytest.mark.parametrize("mode", ["wait", "skip"])
def test_with_room_a_call_goes_ahead_immediately_and_leaves_the_others_alone(mode, enter):
    save = enter(_Save(polls=3))[0]
    assert not start.make_room(2, mode)
    assert save.polls == 3


def test_without_room_a_call_waits_for_as_many_of_the_oldest_as_it_must(enter):
    first, second, third = enter(_Save(polls=3), _Save(polls=2), _Save())
    assert not start.make_room(2, "wait")
    assert (first.polls, second.polls, third.polls) == (0, 0, 1)


def test_without_room_a_call_is_skipped(enter):
    enter(_Save())
    assert start.make_room(1, "skip")


@pytest.mark.parametrize("done", [{"left_out": True}, {"decided": True}])
def test_what_takes_no_memory_any_more_takes_no_room(done, enter):
    enter(_Save(**done), _Save())
    assert not start.make_room(2, "skip")


# ---- the saves of one writer ----------------------------------------------------------------------


class _OfAWriter:
    def __init__(self, *, own=True, error=None):
        self.own = own
        self.committed = SharedFuture(lambda: None)
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
    first, second = _OfAWriter(), _OfAWriter()
    assert Saves().newest is None
    assert _added(first, second).newest is second


def test_wait_waits_for_all_and_for_each_only_once():
    saves = [_OfAWriter(), _OfAWriter(own=False), _OfAWriter()]
    made = _added(*saves)
    made.wait()
    made.wait()
    assert [save.waited for save in saves] == [1, 1, 1]


def test_wait_raises_the_error_of_a_save_of_this_package_and_only_once():
    made = _added(_OfAWriter(), _OfAWriter(error=StorageError(5, "why")))
    with pytest.raises(StorageError, match="why"):
        made.wait()
    made.wait()


def test_an_error_is_raised_though_saves_were_added_after_it():
    failed = _OfAWriter(error=StorageError(5, "why"))
    made = _added(failed)
    failed.wait()
    made.add(_OfAWriter())
    with pytest.raises(StorageError, match="why"):
        made.wait()


def test_an_error_that_the_caller_knows_or_is_told_elsewhere_is_not_raised():
    asked, waited_for = (_OfAWriter(own=each, error=StorageError(5, "")) for each in (True, False))
    made = _added(asked, waited_for)
    asked.wait()
    assert isinstance(asked.committed.exception(), StorageError)
    made.wait()


def test_saves_whose_outcome_is_known_are_let_go():
    done = _OfAWriter()
    done.wait()
    made = _added(done, _OfAWriter())
    made.wait()
    assert done.waited == 1
