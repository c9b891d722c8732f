"""A link between two ranks that does harm: it passes on what one end sends to a server, and the server's answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

__all__ = ["Link", "flipped", "stalled"]

Harm = Callable[[bytes], bytes | None]
"""What becomes of bytes that the server sends; None: nothing more comes, and the connection stays."""


def flipped(data: bytes) -> bytes:
    """One bit of each long piece is another one."""
    if len(data) < 1000:
        return data
    return data[:500] + bytes([data[500] ^ 4]) + data[501:]


def stalled(data: bytes) -> bytes | None:
    """Nothing comes after the first short answer."""
    return data if len(data) < 100 else None


class Link:
    """Listens at a port of its own for connections to ``host`` and ``port``; daemon threads pass bytes on."""

    def __init__(self, host: str, port: int, harm: Harm) -> None:
        self._target = (host, port)
        self._harm = harm
        self.harmed = 0
        """How often the harm has changed what came."""
        self._listening = socket.create_server((host, 0))
        self.port = int(self._listening.getsockname()[1])
        self._start(self._accept)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _start(self, function: Callable[..., None], *args: object) -> None:
        threading.Thread(target=function, args=args, name="link", daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(self._target)
                self._start(self._pass, near, far, lambda data: data)
                self._start(self._pass, far, near, self._harm)

    def _pass(self, source: socket.socket, target: socket.socket, harm: Harm) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                passed = harm(data)
                self.harmed += passed != data
                if passed is None:
                    continue
                target.sendall(passed)
            target.shutdown(socket.SHUT_WR)
