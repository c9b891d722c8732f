"""A server that sends back what it is sent."""

import threading

import pytest
from support.waiting import await_that

from dcp_datastates.wire.server import Server, listen

NAME = "dcp_datastates-wire-test"
MOST = 32 << 20


def echo(line):
    for words, data in line.requests(MOST):
        line.answer(words, data)


def serving():
    return Server(*listen("127.0.0.1"), NAME, echo)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == NAME]


@pytest.fixture
def server():
    made = serving()
    yield made
    made.close()
    await_that(lambda: not threads())
