"""Servers in processes of their own, which end with this one, however that ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from support.waiting import await_that

__all__ = ["Program", "serve", "start"]

# Linux's PR_SET_PDEATHSIG, which is kept when the process becomes another program. Set by a Python of its own, since
# this process has threads: nothing of Python's may run in its forked child.
_BOUND_TO_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Program(NamedTuple):
    """A server that runs."""

    url: str
    process: subprocess.Popen[bytes]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        """At once, and wait for its end."""
        self.process.kill()
        self.process.wait()


def serve(
    command: Callable[[int], Sequence[str]],
    answers_at: str = "/",
    environment: Mapping[str, str] | None = None,
) -> str:
    """The URL of what :func:`start` starts."""
    return start(command, answers_at, environment).url


def start(
    command: Callable[[int], Sequence[str]],
    answers_at: str = "/",
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
) -> Program:
    """Start ``command(port)`` on a ``port`` of 127.0.0.1, or a free one; returns as soon as it answers anything at
    ``answers_at``.

    To be called in the main thread: the server ends with the thread that started it.
    """
    if port is None:
        with contextlib.closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-S", "-c", _BOUND_TO_PARENT, str(os.getpid()), *command(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
    )
    atexit.register(server.kill)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert server.poll() is None, f"{command(port)[0]} ended with {server.returncode}"
        try:
            urllib.request.urlopen(url + answers_at, timeout=60).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    await_that(answers, 120, f"{command(port)[0]} does not answer")
    return Program(url, server)
