"""Properties that are computed once, also in a child that is forked while its parent computes them."""

from __future__ import annotations

import os
import signal
import threading

from dcp_datastates.process.lazily import lazily


class Slow:
    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.computed = 0

    @lazily
    def value(self) -> int:
        """What is asked for."""
        self.begun.set()
        assert self.go_on.wait(30)
        self.computed += 1
        return 7


def test_it_is_computed_once():
    slow = Slow()
    slow.go_on.set()
    assert (slow.value, slow.value) == (7, 7)
    assert slow.computed == 1


def test_a_child_that_is_forked_meanwhile_computes_it_for_itself():
    slow = Slow()
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    assert slow.begun.wait(30)
    child = os.fork()
    if child == 0:
        other = Slow()
        other.go_on.set()
        signal.alarm(20)
        os._exit(other.value)
    slow.go_on.set()
    thread.join(30)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_it_has_the_docstring():
    assert Slow.value.__doc__ == "What is asked for."
