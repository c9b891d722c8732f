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

from support.waiting import await_that

__all__ = ["serve"]

# Linux's PR_SET_PDEATHSIG, which is kept when the process becomes another program. Set by a Python of its own, since
# this process has threads: nothing of Python's may run in its forked child.
_BOUND_TO_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def serve(
    command: Callable[[int], Sequence[str]],
    answers_at: str = "/",
    environment: Mapping[str, str] | None = None,
) -> str:
    """Start ``command(port)`` on a free port of 127.0.0.1; its URL, as soon as it answers anything at ``answers_at``.

    To be called in the main thread: the server ends with the thread that started it.
    """
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
    return url
