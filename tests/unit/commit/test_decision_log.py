"""Decisions in the store: what is written is found, what no rank asks for any more goes."""

import pytest
import torch.distributed as dist

from dcp_datastates.commit.vote import Decision, DecisionLog, Outcome

FAILED = Decision(Outcome.FAILED, given_up=True)
COMMITTED = Decision(Outcome.COMMITTED)


class _Failing:
    """A store that fails while ``down``."""

    def __init__(self):
        self.store = dist.HashStore()
        self.down = False

    def __getattr__(self, name):
        if self.down:
            raise RuntimeError("Connection reset by peer")
        return getattr(self.store, name)


def test_what_the_coordinator_notes_all_ranks_find():
    store = dist.HashStore()
    coordinator, other = DecisionLog(store), DecisionLog(store)
    assert other.find(7) is None
    coordinator.note(7, FAILED)
    assert other.find(7) == FAILED
    assert other.find(8) is None


def test_what_could_not_be_noted_is_noted_later():
    store = _Failing()
    log = DecisionLog(store)
    store.down = True
    with pytest.raises(RuntimeError):
        log.note(7, COMMITTED)
    store.down = False
    assert log.find(7) is None
    log.flush()
    assert log.find(7) == COMMITTED


def test_old_keys_are_dropped_and_only_those():
    store = dist.HashStore()
    kept = DecisionLog(store)
    for number in range(200):
        kept.note(number, FAILED)
        kept.forget_before(number)
    found = [number for number in range(200) if kept.find(number) is not None]
    assert found == list(range(200 - len(found), 200))
    assert 10 <= len(found) <= 100
