"""Messages between two processes: damaged, long, hostile ones, and how long one end waits for the other."""

import contextlib
import json
import math
import pickle
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.waiting import await_that

from dcp_datastates._native import crc32c
from dcp_datastates.wire import line as lines
from dcp_datastates.wire.line import Client, DamagedError, Line, RefusedError
from dcp_datastates.wire.secret import Address
from dcp_datastates.wire.server import Server, listen


@contextlib.contextmanager
def two_ends():
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        line = Line(server.accept()[0])
    with contextlib.closing(line), other:
        yield line, other


@pytest.fixture
def ends():
    """A line, and the socket at its other end."""
    with two_ends() as ends:
        yield ends


def message(said, data=b""):
    checksum = crc32c(data, crc32c(said))
    own = lines._own(len(said), len(data), checksum)
    return bytearray(lines._HEADER.pack(len(said), len(data), checksum, own) + said + data)


def test_what_is_sent_is_received(ends):
    line, other = ends
    to = Line(other)
    for words, data in (
        (["a", 1, None, True, "\udcff\n"], [b""]),
        ([], [b"x" * 100_000, bytearray(3), memoryview(b"end")]),
    ):
        line.send(words, *data)
        found, came = to.receive(200_000)
        assert found == words
        assert came == b"".join(map(bytes, data))


def test_an_answer_is_a_result_or_an_error(ends):
    line, other = ends
    server = Line(other)
    for answer in (
        lambda: server.answer([1, 2], b"da", b"ta"),
        lambda: server.refuse(OSError("no")),
    ):
        line.send("question")
        assert server.receive()[0] == "question"
        answer()
    assert line.result(4) == ([1, 2], b"data")
    with pytest.raises(RefusedError, match="no"):
        line.result()


@pytest.mark.parametrize("at", [-1, 21])
def test_a_damaged_message_is_refused_and_the_next_one_received(ends, at):
    line, other = ends
    damaged = message(b'["x"]', b"data")
    damaged[at] ^= 1
    other.sendall(damaged + message(b'["next"]'))
    with pytest.raises(DamagedError, match="checksum differs"):
        line.receive(4)
    assert line.receive() == (["next"], b"")


@pytest.mark.parametrize(
    "said",
    [b"", b"{", b"\xff\xfe", b"[" * 1_000_000, pickle.dumps(["x"])],
    ids=["none", "open", "no text", "deep", "pickle"],
)
def test_words_that_are_no_json_are_refused(ends, said):
    line, other = ends
    sender = threading.Thread(target=other.sendall, args=(message(said) + message(b'["next"]'),))
    sender.start()
    with pytest.raises(DamagedError):
        line.receive()
    assert line.receive() == (["next"], b"")
    sender.join()


@pytest.mark.parametrize(
    "words", [None, [], ["ok"], ["error", "1", "text"], ["ok", 1, 2], {"ok": 1}]
)
def test_what_is_no_answer_is_damage(ends, words):
    line, other = ends
    other.sendall(message(json.dumps(words).encode()))
    with pytest.raises(DamagedError):
        line.result()


@pytest.mark.parametrize(
    ("length", "nbytes"), [(2, 11), (2, 1 << 63), ((16 << 20) + 1, 0), ((1 << 32) - 1, 0)]
)
def test_a_length_beyond_the_limit_ends_the_connection_before_memory_is_taken(
    ends, length, nbytes, monkeypatch
):
    line, other = ends
    taken = []
    monkeypatch.setattr(
        lines, "bytearray", lambda count: taken.append(count) or bytearray(count), raising=False
    )
    own = lines._own(length, nbytes, 0)
    other.sendall(lines._HEADER.pack(length, nbytes, 0, own))
    with pytest.raises(ConnectionError, match="header"):
        line.receive(10)
    assert taken == [lines._HEADER.size]


@pytest.mark.parametrize("at", range(0, 20, 3))
def test_a_damaged_header_ends_the_connection(ends, at):
    line, other = ends
    damaged = message(b"[]", b"data")
    damaged[at] ^= 4
    other.sendall(damaged)
    with pytest.raises(ConnectionError, match="header"):
        line.receive(100)


def _drop_by_drop(end, stop):
    """Send the header of a long message, then a byte now and then."""
    end.sendall(lines._HEADER.pack(2, 1 << 20, 0, lines._own(2, 1 << 20, 0)))
    while not stop.wait(0.01):
        end.sendall(b"x")


def test_a_message_that_comes_drop_by_drop_ends_in_time(ends):
    line, other = ends
    stop = threading.Event()
    sender = threading.Thread(target=_drop_by_drop, args=(other, stop))
    sender.start()
    line.end_within(0.3)
    with pytest.raises(TimeoutError, match="does not answer"):
        line.receive(1 << 20)
    stop.set()
    sender.join()


def test_a_line_that_ended_in_time_has_time_for_the_next_message(ends):
    line, other = ends
    server = Line(other)
    for _ in range(2):
        line.end_within(30.0)
        line.send("what")
        assert server.receive() == ("what", b"")
        server.answer("that")
        assert line.result() == ("that", b"")


def test_a_line_that_carries_nothing_waits_for_a_request_without_a_limit(monkeypatch):
    monkeypatch.setattr(lines, "PROGRESS_SECONDS", 0.1)
    with two_ends() as (line, other):
        later = threading.Timer(0.4, other.sendall, args=(message(b'["at last"]'),))
        later.start()
        requests = line.requests()
        assert next(requests) == (["at last"], b"")
        other.sendall(message(b'["cut"]')[:-3])
        with pytest.raises(TimeoutError, match=r"within 0\.1 s"):  # its end does not come
            next(requests)
        later.join()


# ---- a client: connections that are kept, that have ended, and servers that are gone -------------------


class _Served:
    """A server that answers with what it was asked, but refuses ``None``."""

    def __init__(self):
        self.connections = self.requests = 0
        self.server = Server(*listen("127.0.0.1"), "dcp_datastates-wire-test", self._serve)

    def _serve(self, line):
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


def gone():
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
    with served.server._changed:  # it may have answered before it is noted
        (line,) = served.server._lines
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
        client = Client([address, served.server.address], most_idle=1)
        with pytest.raises(TimeoutError, match="does not answer"):
            client.ask("silent", seconds=0.2)
    assert served.connections == 0, "the other processes of a host that is gone are not asked"


@pytest.mark.parametrize("seconds", [0.0, math.inf])
def test_an_answer_has_its_time(served, seconds):
    client = Client([served.server.address], most_idle=1)
    client.ask("a connection")
    if seconds:
        assert client.ask("in time", seconds=seconds)[0] == "in time"
    else:
        with pytest.raises(TimeoutError):
            client.ask("late", seconds=seconds)
    client.close()
