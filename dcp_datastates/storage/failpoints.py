"""Named places where a test, or an operator rehearsing an outage, can make this process fail.

``DCP_DATASTATES_FAILPOINTS`` holds ``;``-separated ``name=action`` entries, read when the process first
comes to a failpoint (natively: when its engine starts)::

    publish.rename.before=kill;flush.write.after@3=error:EIO;vote.before=sleep:5

``name@N`` counts: only the N-th time. Actions: ``kill`` (SIGKILL to this process), ``stop`` (SIGSTOP),
``sleep:SECONDS``, ``error:ERRNO`` (an OSError from that place; the system call of a ``.before`` is then not
made). ``DCP_DATASTATES_FAILPOINTS_LOG`` names a file that gets a line with the name before an action is
taken: a test whose failpoint never fired has shown nothing. While the variable is unset, a failpoint is a
call that returns.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from typing import Final

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.process.forks import ProcessLock

__all__ = ["VARIABLE", "hit", "reload"]

VARIABLE: Final = "DCP_DATASTATES_FAILPOINTS"
LOG_VARIABLE: Final = "DCP_DATASTATES_FAILPOINTS_LOG"

_ENTRY = re.compile(r"([a-z_.]+)(?:@(\d+))?=(kill|stop|sleep:[0-9.]+|error:E[A-Z0-9]+)")

_lock = ProcessLock()  # guards the two below
_actions: dict[str, list[tuple[int | None, str]]] | None = None
_hits: dict[str, int] = {}


def hit(name: str) -> None:
    """Do here what the environment asks for. Raises OSError for an ``error`` action."""
    if _actions is None:
        reload()
    if _actions:
        _hit(name)


def reload() -> None:
    """Read the environment again; raises :class:`ConfigurationError` for an entry that is none."""
    global _actions
    actions: dict[str, list[tuple[int | None, str]]] = {}
    for entry in filter(None, os.environ.get(VARIABLE, "").split(";")):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None or (match[3].startswith("error:") and not hasattr(errno, match[3][6:])):
            raise ConfigurationError(
                f"{VARIABLE}: {entry!r} is not name=action or name@N=action, with an action of kill, stop, "
                f"sleep:SECONDS or error:ERRNO"
            )
        actions.setdefault(match[1], []).append((int(match[2]) if match[2] else None, match[3]))
    with _lock:
        _hits.clear()
        _actions = actions


def _hit(name: str) -> None:
    with _lock:
        entries = (_actions or {}).get(name)
        if not entries:
            return
        _hits[name] = count = _hits.get(name, 0) + 1
    for nth, action in entries:
        if nth is None or nth == count:
            _log(name)
            _act(name, action)


def _log(name: str) -> None:
    path = os.environ.get(LOG_VARIABLE)
    if path:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, f"{name}\n".encode())
        finally:
            os.close(descriptor)


def _act(name: str, action: str) -> None:
    verb, _, argument = action.partition(":")
    if verb == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif verb == "stop":
        # To this thread: one to the process may stop another first, and this one goes on for a moment.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif verb == "sleep":
        time.sleep(float(argument))
    elif verb == "error":
        number = getattr(errno, argument)
        raise OSError(number, f"{os.strerror(number)} (failpoint {name})")
