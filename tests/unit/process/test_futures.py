"""``Worker``: what is posted runs once and in order, whatever comes in between."""

import queue
import threading
from typing import Any

import pytest

from dcp_datastates.process.futures import Worker


def test_work_runs_in_order_and_none_is_taken_after_the_close():
    worker, done = Worker("test"), []
    for number in range(100):
        assert worker.post(lambda number=number: done.append(number))
    worker.close()
    assert done == list(range(100))
    assert not worker.post(lambda: done.append(-1))
    assert worker.refusal == "the process is ending"


def test_a_failing_function_does_not_end_the_thread(caplog):
    worker, done = Worker("test"), []
    worker.post(lambda: 1 / 0)
    worker.post(lambda: done.append(1))
    worker.close()
    assert done == [1]
    assert "unexpected error in test" in caplog.text


class _Held(queue.SimpleQueue[Any]):
    """Its first ``put`` does not return, as if a signal handler ran right behind it."""

    def __init__(self):
        self.first = True
        self.goes_on = threading.Event()

    def put(self, item, *rest, **keywords):
        super().put(item)
        if self.first:
            self.first = False
            assert self.goes_on.wait(60)


def test_another_thread_posts_while_one_is_interrupted_in_a_post():
    """A signal handler that saves may wait for that other thread."""
    worker, done = Worker("test"), []
    held = worker._work = _Held()
    interrupted = threading.Thread(target=worker.post, args=(lambda: done.append("first"),))
    interrupted.start()
    other = threading.Thread(target=worker.post, args=(lambda: done.append("second"),))
    other.start()
    other.join(30)
    assert not other.is_alive()
    held.goes_on.set()
    interrupted.join()
    worker.close()
    assert sorted(done) == ["first", "second"]


def test_nothing_that_was_taken_is_lost_when_a_close_comes_in_between():
    for _ in range(300):
        worker, done, taken = Worker("test"), [], []

        def post_some(worker=worker, done=done, taken=taken):
            for number in range(50):
                if worker.post(lambda number=number: done.append(number)):
                    taken.append(number)

        poster = threading.Thread(target=post_some)
        poster.start()
        worker.finish()
        poster.join()
        worker.close()
        assert sorted(done) == taken


class _Late(queue.SimpleQueue[Any]):
    """A ``put`` of a function, other than the first, comes after the thread has ended."""

    def __init__(self, worker):
        self.worker = worker
        self.puts = 0

    def put(self, item, *rest, **keywords):
        self.puts += item is not None
        if item is not None and self.puts == 2:
            self.worker.close()
        super().put(item)


def test_what_is_handed_over_behind_the_threads_end_runs_all_the_same():
    worker, done = Worker("test"), []
    worker._work = _Late(worker)
    assert worker.post(lambda: done.append("first"))
    assert worker.post(lambda: done.append("second"))
    assert done == ["first", "second"]


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("can't start new thread", ("can't start new thread", "ulimit -u")),
        ("can't create new thread at interpreter shutdown", ("the process is ending",)),
    ],
)
def test_a_thread_that_cannot_start_is_told_by_its_cause(cause, words, monkeypatch):
    def refuse(thread):
        raise RuntimeError(cause)

    worker = Worker("test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not worker.post(lambda: None)
    assert all(word in worker.refusal for word in words)
    done = []
    assert worker.post(lambda: done.append(1)), "the next one tries again"
    worker.close()
    assert done == [1]
