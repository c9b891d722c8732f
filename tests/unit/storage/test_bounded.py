"""File operations that are abandoned when they hang."""

import threading

import pytest
from support.waiting import await_that

from dcp_datastates.errors import StorageError
from dcp_datastates.storage import operations
from dcp_datastates.storage.bounded import (
    HungError,
    bounded,
    check_not_hung,
    finished_within,
    is_hung,
)

SECONDS = 0.05


@pytest.fixture
def hang():
    event = threading.Event()
    yield event
    event.set()


def test_a_result_and_an_error_come_back(tmp_path):
    assert bounded("adding", tmp_path, 60, lambda: 1 + 1) == 2
    with pytest.raises(FileNotFoundError):
        bounded("listing", tmp_path, 60, (tmp_path / "missing").stat)
    assert not is_hung(tmp_path)


def test_abandoned_work_goes_no_further_than_the_operation_that_hung(tmp_path, hang):
    def work():
        operations.make_directory(tmp_path / "before", "test")
        hang.wait()
        try:
            operations.make_directory(tmp_path / "after", "test")
        except Exception:  # no handler may go on
            operations.make_directory(tmp_path / "handler", "test")

    with pytest.raises(HungError, match="making has not returned"):
        bounded("making", tmp_path, SECONDS, work)
    with pytest.raises(StorageError, match="making by an earlier save has not returned"):
        check_not_hung(tmp_path)
    check_not_hung(tmp_path / "other")
    hang.set()
    await_that(lambda: not is_hung(tmp_path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["before"]


def test_work_that_makes_progress_is_waited_for(tmp_path):
    ticks = iter(range(13))

    def work():
        for number in ticks:
            threading.Event().wait(0.1)
            operations.make_directory(tmp_path / str(number), "test")
        return "done"

    assert bounded("making", tmp_path, 1, work) == "done"


def test_work_whose_end_need_not_be_known_goes_on(tmp_path, hang):
    def work():
        hang.wait()
        operations.make_directory(tmp_path / "later", "test")

    assert not finished_within(SECONDS, work)
    assert not is_hung(tmp_path)
    hang.set()
    await_that((tmp_path / "later").exists)


def test_one_thread_serves_work_after_work(tmp_path):
    first = bounded("looking", tmp_path, 60, threading.current_thread)
    with pytest.raises(FileNotFoundError):
        bounded("looking", tmp_path, 60, (tmp_path / "missing").stat)
    for _ in range(20):
        assert bounded("looking", tmp_path, 60, threading.current_thread) is first
