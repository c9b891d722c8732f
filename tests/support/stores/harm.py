"""Stands between a client and a server, or two ranks, by TCP, and does harm to what passes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

Harm = Callable[[int, bytes], "bytes | None"]
"""Of the number of bytes that have come from one side, and what comes now: what passes. None: the connection ends."""


def cut_after(nbytes: int) -> Harm:
    """The connection ends after that many bytes."""
    return lambda before, data: data if before + len(data) <= nbytes else None


def flipped_at(offset: int) -> Harm:
    """One bit of the byte at ``offset`` changes."""

    def harm(before: int, data: bytes) -> bytes:
        if not before <= offset < before + len(data):
            return data
        changed = bytearray(data)
        changed[offset - before] ^= 1
        return bytes(changed)

    return harm


def flipped_in_each(before: int, data: bytes) -> bytes:
    """One bit of each long piece changes."""
    return data if len(data) < 1000 else flipped_at(before + 500)(before, data) or b""


def held_after(nbytes: int) -> Harm:
    """After that many bytes nothing more passes."""
    return lambda before, data: data if before + len(data) <= nbytes else b""


class HarmProxy:
    """Listens at :attr:`port`; passes on to ``port`` of this machine. ``up`` is what happens to what clients send,
    ``down`` to what the server answers; None: no harm. Both may be changed at any time.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.up: Harm | None = None
        self.down: Harm | None = None
        self.harmed = 0
        """How often what came was not what passed."""
        self._target = (host, port)
        self._listening = socket.create_server((host, 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._target)
                for source, target, way in ((client, server, "up"), (server, client, "down")):
                    threading.Thread(
                        target=self._pass, args=(source, target, way), daemon=True
                    ).start()

    def _pass(self, source: socket.socket, target: socket.socket, way: str) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                harm: Harm | None = getattr(self, way)
                after = data if harm is None else harm(passed, data)
                passed += len(data)
                self.harmed += after != data
                if after is None:
                    break
                target.sendall(after)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the other thread
            each.close()
