"""The order of DCP's threads: one at a time, as the saves were called."""

import threading

import pytest

from dcp_datastates.commit.group import commit_group
from dcp_datastates.config import WriterConfig
from dcp_datastates.dcp import turn
from dcp_datastates.dcp.turn import DcpSave
from dcp_datastates.ranks.rank_set import ALONE
from dcp_datastates.results import SaveStats
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.outcome import SaveOrigin


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(turn, "_BEGIN_SECONDS", 0.0)
    monkeypatch.setattr(turn, "_LEAVE_SECONDS", 0.0)


@pytest.fixture
def order():
    return []


def _save():
    group, config = commit_group(ALONE), WriterConfig(64 << 20)
    return SaveOperation(group, config, SaveOrigin.DCP_ASYNC, None, SaveStats(), {})


def _run(mine, order, go_on=None, end=None):
    """A thread of DCP's: it comes, works until ``go_on``, and lives on until ``end``."""
    come = threading.Event()

    def run():
        mine.come()
        come.set()
        if go_on is not None:
            go_on.wait(30)
        mine.wait()
        order.append(mine)
        if end is not None:
            end.wait(60)

    thread = threading.Thread(target=run)
    thread.start()
    assert come.wait(30)
    return thread


def test_a_turn_is_kept_for_a_thread_that_has_come_and_takes_its_time(order):
    """Longer than a thread may take to come: copies on a device may take minutes."""
    blocks = DcpSave(_save())
    free = threading.Event()
    first_thread = _run(blocks, order, end=free)
    first, second = DcpSave(_save()), DcpSave(_save())
    go_on = threading.Event()
    slow, quick = _run(first, order, go_on), _run(second, order)
    free.set()
    quick.join(0.5)
    assert order == [blocks]
    go_on.set()
    for thread in (first_thread, slow, quick):
        thread.join(30)
    assert order == [blocks, first, second]


def test_a_thread_that_lives_on_after_the_outcome_lets_the_next_go(order):
    """A callback of DCP's future runs in DCP's thread, when DCP is done with the save: it may wait for the next one."""
    save, end = _save(), threading.Event()
    first = DcpSave(save)
    staying = _run(first, order, end=end)
    second = DcpSave(_save())
    following = _run(second, order)
    following.join(0.5)
    assert order == [first]
    save.committed.set_result(None)
    following.join(30)
    assert order == [first, second]
    end.set()
    staying.join(30)


def test_a_turn_that_nobody_comes_for_is_passed_over(order):
    left = _save()
    DcpSave(left)
    second = DcpSave(_save())
    _run(second, order).join(30)
    assert order == [second]
    assert left.over


def test_a_save_whose_thread_has_died_is_over_and_says_so(order):
    save = _save()
    _run(DcpSave(save), order).join(30)
    _run(DcpSave(_save()), order).join(30)
    assert save.over
    assert "DCP ended this save" in str(save.committed.exception(0))
