"""The server that each process of a job runs: it gives the other nodes access to the memory of its own."""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from dcp_datastates.tiers import ram_messages as messages
from dcp_datastates.tiers import ram_protocol as protocol
from dcp_datastates.tiers.ram_files import RamFiles, Unpublished
from dcp_datastates.tiers.ram_protocol import Kind, Line

__all__ = ["LineServer", "RamServer"]

logger = logging.getLogger(__name__)

_MOST_REQUEST_BYTES: Final = 64 << 20
_LOOK_SECONDS: Final = 0.05

_THREAD_NAME: Final = "dcp_datastates-ram"


class LineServer(ABC):
    """Answers at ``listening`` who shows :attr:`token`.

    One daemon thread takes connections; each has another one.
    """

    def __init__(self, listening: socket.socket, token: bytes, thread_name: str) -> None:
        self.token: Final = token
        self.port: Final = int(listening.getsockname()[1])
        self._listening = listening
        self._thread_name = thread_name
        self._lock = threading.RLock()  # guards _lines
        self._lines: set[Line] = set()
        self._start(self._accept)

    @abstractmethod
    def answer(self, line: Line) -> None:
        """Receive a request, and answer it. Raises OSError, which ends the connection."""

    def await_unused(self, seconds: float) -> bool:
        """Wait until no other process is connected, or for ``seconds``; return whether none is."""
        deadline = time.monotonic() + seconds
        while self._lines:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def close(self) -> None:
        """End all connections, and take no more. Idempotent."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listening.close()
        with self._lock:
            lines = list(self._lines)
        for line in lines:
            line.close()

    # ---- the threads -------------------------------------------------------------------------------

    def _accept(self) -> None:
        while self._listening.fileno() >= 0:
            line: Line | None = None
            try:
                line = Line(self._listening.accept()[0])
                with self._lock:
                    self._lines.add(line)
                self._start(self._serve, line)
            except (OSError, RuntimeError) as error:  # too many open files, or threads; or closed
                if line is not None:
                    self._end(line)
                logger.debug("a connection of another node failed: %s", error)
                time.sleep(_LOOK_SECONDS)

    def _start(self, function: Callable[..., None], *args: object) -> None:
        threading.Thread(target=function, args=args, name=self._thread_name, daemon=True).start()

    def _serve(self, line: Line) -> None:
        try:
            if self._is_admitted(line):
                while True:
                    self.answer(line)
        except ConnectionError:  # the other end has closed it, or was killed
            pass
        except OSError as error:
            with contextlib.suppress(OSError):
                line.send(Kind.ERROR, messages.packed_error(error))
                line.drain()
        except Exception:
            logger.exception("unexpected error in %s", self._thread_name)
        finally:
            self._end(line)

    def _end(self, line: Line) -> None:
        line.close()
        with self._lock:
            self._lines.discard(line)

    def _is_admitted(self, line: Line) -> bool:
        kind, token = line.receive(most=protocol.TOKEN_BYTES)
        if kind is not Kind.HELLO or not hmac.compare_digest(bytes(token), self.token):
            raise PermissionError(errno.EACCES, "the token is not that of this process")
        line.send(Kind.OK)
        return True


class RamServer(LineServer):
    """Serves ``files`` at ``host``, an address of this machine. Raises OSError if it cannot listen there."""

    def __init__(self, files: RamFiles, host: str) -> None:
        self._files = files
        token = secrets.token_bytes(protocol.TOKEN_BYTES)
        super().__init__(protocol.listen(host), token, _THREAD_NAME)

    def answer(self, line: Line) -> None:
        kind, data = line.receive(most=_MOST_REQUEST_BYTES, is_idle=True)
        if kind is Kind.PUT:
            with contextlib.closing(
                self._files.unpublished(messages.unpacked_keys(data)[0])
            ) as new:
                line.send(Kind.OK)
                self._take(line, new)
            return
        try:
            answer = self._look(kind, data)
        except OSError as error:
            line.send(Kind.ERROR, messages.packed_error(error))
        else:
            line.send(Kind.OK, *answer)

    def _look(self, kind: Kind, data: memoryview) -> list[bytes]:
        """The answer to a request that needs one message; empty if there is no such object."""
        files, packed = self._files, messages.packed_entries
        if kind is Kind.READ:
            found = files.read(*messages.unpacked_range(data))
            return [] if found is None else [packed([found[0]]), found[1]]
        if kind is Kind.LEFT:
            return [messages.packed_number(files.left())]
        keys = messages.unpacked_keys(data)
        if kind is Kind.FIND:
            entry = files.find(keys[0])
            return [] if entry is None else [packed([entry])]
        if kind is Kind.LIST:
            return [packed(files.list(keys[0]))]
        if kind is Kind.DELETE:
            files.delete(keys)
            return []
        raise protocol.DamagedError

    def _take(self, line: Line, new: Unpublished) -> None:
        """Receive an object. What this raises ends the connection, and removes the object."""
        while True:
            kind, data = line.receive(pieces_to=new.write, is_idle=True)
            if kind is Kind.COMPLETE:
                line.send(Kind.OK)
            elif kind is Kind.PUBLISH:
                done = new.publish(*messages.unpacked_publish(data))
                line.send(Kind.OK, bytes([done]))
                return
            elif kind is not Kind.PIECE:
                raise protocol.DamagedError
