"""A process asks another one: connections that are kept, that have ended, and servers that are gone."""

from __future__ import annotations

import contextlib
import math
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.waiting import await_that

from dcp_datastates.wire.client import Client
from dcp_datastates.wire.line import RefusedError
from dcp_datastates.wire.secret import Address
from dcp_datastates.wire.server import Server, listen


class _Served:
    """A server that answers with what it was asked, but refuses ``None``."""

    def __init__(self) -> None:
        self.connections = self.requests = 0
        self.server = Server(*listen("127.0.0.1"), "dcp_datastates-wire-test", self._serve)

    def _serve(self, line) -> None:
        self.connections += 1
        for words, _ in line.requests():
            self.requests += 1
            if words is None:
                line.refuse(OSError(2, "there is nothing"))
            else:
                line.answer(words)


@pytest.fixture
def served():
    made = _Served()
    yield made
    made.server.close()


def gone() -> Address:
    """Of a server that is no more."""
    listening, address = listen("127.0.0.1")
    listening.close()
    return address


def test_one_connection_serves_many_requests_and_refusals(served):
    client = Client([served.server.address], most_idle=2)
    for number in range(3):
        assert client.ask(number)[0] == number
        with pytest.raises(RefusedError, match="there is nothing"):
            client.ask(None)
    assert (served.connections, served.requests) == (1, 6)
    client.close()
    await_that(lambda: served.server.await_unused(0))


def test_threads_ask_at_the_same_time_and_few_connections_are_kept(served):
    client = Client([served.server.address], most_idle=2)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda n: client.ask(n)[0], range(100))) == list(range(100))
    await_that(lambda: len(served.server._lines) <= 2)
    client.close()
    assert client.ask("after")[0] == "after"
    await_that(lambda: served.server.await_unused(0))


def test_a_connection_that_ended_while_it_was_idle_is_made_again(served):
    client = Client([served.server.address], most_idle=2)
    client.ask(1)
    for line in list(served.server._lines):
        line.close()
    assert client.ask(2)[0] == 2
    assert served.connections == 2
    client.close()


def test_the_first_server_that_takes_a_connection_is_asked(served):
    client = Client([gone(), served.server.address], most_idle=0)
    assert client.ask("other")[0] == "other"
    with pytest.raises(ConnectionRefusedError):
        Client([gone(), gone()], most_idle=0).ask("none")


def test_a_server_that_is_silent_is_waited_for_no_longer_than_said(served):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        address = Address("127.0.0.1", silent.getsockname()[1], bytes(16))
        client = Client([address, served.server.address], most_idle=1, connect_seconds=0.2)
        with pytest.raises(TimeoutError, match="does not answer"):
            client.ask("silent")
    assert served.connections == 0, "the other processes of a host that is gone are not asked"


@pytest.mark.parametrize("seconds", [0.0, math.inf])
def test_an_answer_has_its_time(served, seconds):
    client = Client([served.server.address], most_idle=1, answer_seconds=seconds)
    if seconds:
        assert client.ask("in time")[0] == "in time"
    else:
        with pytest.raises(TimeoutError):
            client.ask("late")
    client.close()
