"""The saves of one writer: what wait() waits for, and which errors it raises."""

import pytest

from dcp_datastates.errors import StorageError
from dcp_datastates.process.futures import SharedFuture
from dcp_datastates.saving.start import Saves


class _Save:
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
    first, second = _Save(), _Save()
    assert Saves().newest is None
    assert _added(first, second).newest is second


def test_wait_waits_for_all_and_for_each_only_once():
    saves = [_Save(), _Save(own=False), _Save()]
    made = _added(*saves)
    made.wait()
    made.wait()
    assert [save.waited for save in saves] == [1, 1, 1]


def test_wait_raises_the_error_of_a_save_of_this_package_and_only_once():
    made = _added(_Save(), _Save(error=StorageError(5, "why")))
    with pytest.raises(StorageError, match="why"):
        made.wait()
    made.wait()


def test_an_error_is_raised_though_saves_were_added_after_it():
    failed = _Save(error=StorageError(5, "why"))
    made = _added(failed)
    failed.wait()
    made.add(_Save())
    with pytest.raises(StorageError, match="why"):
        made.wait()


def test_an_error_that_the_caller_knows_or_is_told_elsewhere_is_not_raised():
    asked, waited_for = (_Save(own=each, error=StorageError(5, "")) for each in (True, False))
    made = _added(asked, waited_for)
    asked.wait()
    assert isinstance(asked.committed.exception(), StorageError)
    made.wait()


def test_saves_whose_outcome_is_known_are_let_go():
    done = _Save()
    done.wait()
    made = _added(done, _Save())
    made.wait()
    assert done.waited == 1
