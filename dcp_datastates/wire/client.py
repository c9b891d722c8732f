"""Another process of the job, as this one asks it."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Sequence
from typing import Any, Final

from dcp_datastates.wire.line import CONNECT_SECONDS, Line, RefusedError, connect
from dcp_datastates.wire.secret import Address


class Client:
    """The servers at ``addresses``, which have the same to say: the first that takes a connection is asked. Any thread;
    each request that is under way has a connection of its own.

    Args:
        most_idle: so many connections are kept for later requests.
        connect_seconds: within which a server takes a connection.
        answer_seconds: within which a request is answered, even while bytes pass.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        most_idle: int,
        connect_seconds: float = CONNECT_SECONDS,
        answer_seconds: float = math.inf,
    ) -> None:
        self.addresses: Final = addresses
        self._most_idle = most_idle
        self._connect_seconds, self._answer_seconds = connect_seconds, answer_seconds
        self._lock = threading.RLock()  # guards what follows
        self._idle: list[Line] = []

    def ask(self, words: object, *, most: int = 0) -> tuple[Any, memoryview]:
        """The result of a request, with data of at most ``most`` bytes. Raises OSError; :class:`RefusedError` if the
        server has answered with an error.
        """
        line, result, data = self.begin(words, most=most)
        self.give_back(line)
        return result, data

    def begin(self, words: object, *, most: int = 0) -> tuple[Line, Any, memoryview]:
        """As :meth:`ask`. Returns the connection, too, for more requests: it is to be given back or closed.

        If an idle connection turns out to have ended, the request is sent once more: it must do no harm twice.
        """
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        if idle is not None:
            with contextlib.suppress(ConnectionError):
                return self._asked(idle, words, most)
        return self._asked(self._connected(), words, most)

    def give_back(self, line: Line) -> None:
        """Keep a connection, whose requests were answered, for others."""
        with self._lock:
            if len(self._idle) < self._most_idle:
                self._idle.append(line)
                return
        line.close()

    def close(self) -> None:
        """End the connections that carry no request, and keep none from now on. Idempotent."""
        with self._lock:
            self._most_idle = 0
            lines, self._idle = self._idle, []
        for line in lines:
            line.close()

    def _asked(self, line: Line, words: object, most: int) -> tuple[Line, Any, memoryview]:
        try:
            line.end_within(self._answer_seconds)
            line.send(words)
            return line, *line.result(most)
        except RefusedError:
            self.give_back(line)
            raise
        except BaseException:
            line.close()
            raise

    def _connected(self) -> Line:
        failure: OSError | None = None
        for address in self.addresses:
            try:
                return connect(address, self._connect_seconds)
            except OSError as error:
                failure = failure or error
                if isinstance(error, TimeoutError):  # the host is gone: so are its other processes
                    break
        assert failure is not None, "there is an address"
        raise failure
