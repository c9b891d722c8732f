"""Messages between two processes: damaged, long, hostile ones, and how long one end waits for the other."""

from __future__ import annotations

import json
import pickle
import socket
import threading

import pytest

from dcp_datastates._native import crc32c
from dcp_datastates.wire import line as lines
from dcp_datastates.wire.line import DamagedError, Line, RefusedError


@pytest.fixture
def ends():
    """A line, and the socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        line = Line(server.accept()[0])
    yield line, other
    line.close()
    other.close()


def message(said: bytes, data: bytes = b"") -> bytearray:
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


def _drop_by_drop(end: socket.socket, stop: threading.Event) -> None:
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


def test_a_line_that_carries_nothing_waits_for_a_request_without_a_limit(ends, monkeypatch):
    monkeypatch.setattr(lines, "PROGRESS_SECONDS", 0.1)
    line, other = ends
    later = threading.Timer(0.4, other.sendall, args=(message(b'["at last"]')[:-3],))
    later.start()
    with pytest.raises(TimeoutError):  # its end does not come
        next(line.requests())
    other.sendall(message(b'["at last"]'))
    later.join()
