"""A server for the other processes of the job, in a process that trains.

One thread accepts connections. It holds those that have not proved yet that they know the key, without a thread for
each: at most :data:`MOST_STRANGERS`, of which the oldest goes for a new one, and each for :data:`STRANGER_SECONDS` at
most, the handshake of TLS included. A connection that has proved it gets a thread of its own, which ends with it.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Final

from dcp_datastates.process.forks import closed_in_children
from dcp_datastates.wire.line import CHALLENGE_BYTES, PROOF_BYTES, Line, new_challenge, proof
from dcp_datastates.wire.secret import Address, encryption

logger = logging.getLogger(__name__)

MOST_STRANGERS: Final = 64
STRANGER_SECONDS: Final = 5.0
MOST_LINES: Final = 4096
"""Connections that have proved that they know the key: two of each process of a job."""

_LOOK_SECONDS: Final = 0.05
_TOKEN_BYTES: Final = 16
_ANSWER_BYTES: Final = CHALLENGE_BYTES + PROOF_BYTES


def listen(host: str) -> tuple[socket.socket, Address]:
    """A socket that takes connections at ``host``, an address of this machine, and its address. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = closed_in_children(socket.create_server((host, 0), family=family, backlog=1024))
    listening.setblocking(False)
    return listening, Address(host, int(listening.getsockname()[1]), os.urandom(_TOKEN_BYTES))


class _Stranger:
    """A connection that has not proved yet that it knows the key."""

    def __init__(self, connection: socket.socket, tls: ssl.SSLContext | None) -> None:
        self.challenge: Final = new_challenge(has_tls=tls is not None)
        self.ends_at: Final = time.monotonic() + STRANGER_SECONDS
        self.said = b""
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # it has ended: has_proved() finds that, too
            connection.send(self.challenge)
        if tls is not None:  # shakes hands when it is read
            connection = tls.wrap_socket(connection, True, do_handshake_on_connect=False)
        self.connection: Final = closed_in_children(connection)

    def has_proved(self, key: bytes) -> bool | None:
        """Read what has come; returns whether it proves that the other end knows ``key``, None if more is to come."""
        try:
            while missing := _ANSWER_BYTES - len(self.said):
                if not (data := self.connection.recv(missing)):
                    return False
                self.said += data
            both = self.challenge + self.said[:CHALLENGE_BYTES]
            knows = hmac.compare_digest(self.said[CHALLENGE_BYTES:], proof(key, b"client", both))
            self.connection.send(proof(key, b"server", both) if knows else bytes(PROOF_BYTES))
        except (BlockingIOError, ssl.SSLWantReadError):
            return None
        except OSError:  # the connection has ended, or no handshake begins so
            return False
        return knows


class Server:
    """Serves at ``listening``, which this takes over, by ``serve``: called for each connection, in its thread, until it
    raises an OSError, as it does when the connection ends.

    Raises RuntimeError if the system gives no thread, and :class:`ConfigurationError`.
    """

    def __init__(
        self,
        listening: socket.socket,
        address: Address,
        thread_name: str,
        serve: Callable[[Line], None],
    ) -> None:
        self.address: Final = address
        self._key, self._tls = address.key(), encryption(of_server=True)
        self._listening = listening
        self._thread_name = thread_name
        self._serve = serve
        self._changed = threading.Condition()  # guards what follows
        self._lines: set[Line] = set()
        self._is_closed = False
        self._start(self._accept)

    def await_unused(self, seconds: float) -> bool:
        """Wait until no other process is connected, or for ``seconds``; return whether none is."""
        with self._changed:  # a line may answer before the acceptor's thread has noted it
            return self._changed.wait_for(lambda: not self._lines, seconds)

    def close(self) -> None:
        """End all connections, and take no more. Idempotent."""
        with self._changed:
            self._is_closed = True
            lines = list(self._lines)
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
        for line in lines:
            line.end()

    # ---- the threads ---------------------------------------------------------------------------------

    def _start(self, function: Callable[..., None], *args: object) -> None:
        threading.Thread(target=function, args=args, name=self._thread_name, daemon=True).start()

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listening, select.POLLIN)
        strangers: dict[int, _Stranger] = {}  # by descriptor, the oldest first

        def drop(number: int) -> socket.socket:
            poll.unregister(number)
            return strangers.pop(number).connection

        try:
            while not self._is_closed:
                oldest = next(iter(strangers), -1)
                left = strangers[oldest].ends_at - time.monotonic() if strangers else math.inf
                if left <= 0 or len(strangers) > MOST_STRANGERS:
                    drop(oldest).close()
                    continue
                for number, _ in poll.poll(None if left == math.inf else 1000 * left):
                    if number in strangers:
                        proved = strangers[number].has_proved(self._key)
                        if proved is not None:
                            self._admit(drop(number), proved)
                    elif (new := self._accepted()) is not None:
                        strangers[new.connection.fileno()] = new
                        poll.register(new.connection, select.POLLIN)
        finally:
            for each in strangers.values():
                each.connection.close()
            self._listening.close()

    def _accepted(self) -> _Stranger | None:
        try:
            connection, _ = self._listening.accept()
        except OSError as error:
            logger.debug("a connection of another process failed: %s", error)
            time.sleep(_LOOK_SECONDS)  # too many open files: strangers' go in a few seconds
            return None
        with contextlib.suppress(OSError):  # it has ended
            return _Stranger(connection, self._tls)
        return None

    def _admit(self, connection: socket.socket, proved: bool) -> None:
        """Give the connection a thread, if it has ``proved`` that it knows the key; else close it."""
        with self._changed:
            if proved and not self._is_closed and len(self._lines) < MOST_LINES:
                try:
                    line = Line(connection, patience=2.0)
                    self._start(self._serve_one, line)
                    self._lines.add(line)
                    return
                except (OSError, RuntimeError) as error:  # it has ended, or there is no thread
                    logger.debug("a connection of another process failed: %s", error)
        connection.close()

    def _serve_one(self, line: Line) -> None:
        try:
            self._serve(line)
        except OSError as error:  # the other end has closed it, was killed, or is silent
            logger.debug("a connection of another process has ended: %s", error)
        except Exception:
            logger.exception("unexpected error in %s", self._thread_name)
        finally:
            line.close()
            with self._changed:
                self._lines.discard(line)
                self._changed.notify_all()
