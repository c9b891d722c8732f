"""Decisions in the store: the first to write decides, and what nobody may want any more goes."""

import pytest
import torch.distributed as dist

from dcp_datastates.commit import record
from dcp_datastates.commit.decision import Decision, Outcome
from dcp_datastates.commit.record import Decided, Record

FAILED = Decision(Outcome.FAILED, given_up=True)
COMMITTED = Decision(Outcome.COMMITTED)
PUBLISHING = Decision(Outcome.PUBLISHING)


def test_the_first_to_write_decides():
    store = dist.HashStore()
    coordinator, other = Record(store), Record(store)
    assert other.find(7) is None
    assert other.decide(7, FAILED) is FAILED
    with pytest.raises(Decided) as decided:
        coordinator.decide(7, PUBLISHING)
    assert decided.value.decision == FAILED
    assert coordinator.find(7) == FAILED


def test_who_finds_that_it_is_being_published_has_not_decided():
    store = dist.HashStore()
    coordinator, other = Record(store), Record(store)
    coordinator.decide(7, PUBLISHING)
    assert other.decide(7, FAILED) == PUBLISHING
    coordinator.settle(7, COMMITTED)
    assert other.find(7) == COMMITTED


def test_old_decisions_are_dropped_and_only_those():
    kept = Record(dist.HashStore())
    for number in range(2 * record._KEPT):
        kept.decide(number, FAILED)
        kept.forget_before(number)
    found = [number for number in range(2 * record._KEPT) if kept.find(number) is not None]
    assert found == list(range(record._KEPT, 2 * record._KEPT))


def test_a_rank_alone_needs_no_store():
    alone = Record()
    assert alone.decide(7, PUBLISHING) is PUBLISHING
    alone.settle(7, COMMITTED)
    alone.forget_before(7)
    assert alone.find(7) is None
