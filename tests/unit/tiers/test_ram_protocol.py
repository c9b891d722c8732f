"""A line between two processes: how long one waits for the other."""

from __future__ import annotations

import socket
import threading

import pytest

from dcp_datastates.tiers.ram_protocol import Kind, Line


def _drop_by_drop(end: socket.socket, stop: threading.Event) -> None:
    """Send the header of a long message, then a byte now and then."""
    end.sendall(bytes([Kind.OK, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255]))
    while not stop.wait(0.01):
        end.sendall(b"x")


def test_a_message_that_comes_drop_by_drop_ends_in_time():
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = Line.to(*server.getsockname(), 5.0)
        end, _ = server.accept()
        stop = threading.Event()
        sender = threading.Thread(target=_drop_by_drop, args=(end, stop))
        sender.start()
        line.end_within(0.3)
        with pytest.raises(TimeoutError, match="does not answer"):
            line.receive()
        stop.set()
        sender.join()
        line.close()
        end.close()


def test_a_line_that_ended_in_time_has_time_for_the_next_message():
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = Line.to(*server.getsockname())
        other = Line(server.accept()[0])
        for _ in range(2):
            line.end_within(30.0)
            line.send(Kind.READ, b"what")
            assert other.receive() == (Kind.READ, b"what")
            other.send(Kind.OK, b"that")
            assert line.receive() == (Kind.OK, b"that")
        line.close()
        other.close()
