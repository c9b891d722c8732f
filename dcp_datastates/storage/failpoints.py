"""Named places where a test, or an operator rehearsing an outage, can make this process fail.

``DCP_DATASTATES_FAILPOINTS`` holds ``;``-separated ``name=action`` entries, read when the process first comes to a
failpoint or makes its engine, which keeps what was read then::

    publish.rename.before=kill;flush.write.after@3=error:EIO;vote.before=sleep:5

``name@N`` counts: only the N-th time in this process. Actions: ``kill`` (SIGKILL to this process), ``stop`` (SIGSTOP),
``sleep:SECONDS``, ``error:ERRNO`` (an OSError from that place; the system call of a ``.before`` is then not
made). ``DCP_DATASTATES_FAILPOINTS_LOG`` names a file that gets a line with the name before an action is
taken: a test whose failpoint never fired has shown nothing. While the variable is unset, a failpoint is a
call that returns.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Final

from dcp_datastates._native import Failpoints
from dcp_datastates.errors import ConfigurationError

__all__ = ["VARIABLE", "current", "hit", "reload"]

VARIABLE: Final = "DCP_DATASTATES_FAILPOINTS"
LOG_VARIABLE: Final = "DCP_DATASTATES_FAILPOINTS_LOG"

_ENTRY: Final = re.compile(
    r"([a-z_.]+)(?:@([0-9]{1,18}))?=(kill|stop|sleep:[0-9]*\.?[0-9]+|error:E[A-Z0-9]+)"
)

_failpoints: Failpoints | None = None


def hit(name: str) -> None:
    """Do here what the environment asks for. Raises OSError for an ``error`` action."""
    number = current().hit(name)
    if number:
        raise OSError(number, f"{os.strerror(number)} (failpoint {name})")


def current() -> Failpoints:
    """Those of this process. Raises as :func:`reload` does."""
    return _failpoints or reload()


def reload() -> Failpoints:
    """Read the environment again; raises :class:`ConfigurationError` for an entry that is none."""
    global _failpoints
    entries = filter(None, os.environ.get(VARIABLE, "").split(";"))
    _failpoints = Failpoints(list(map(_parsed, entries)), os.environ.get(LOG_VARIABLE, ""))
    return _failpoints


def _parsed(entry: str) -> tuple[str, int | None, str, float]:
    match = _ENTRY.fullmatch(entry.strip())
    if match is not None:
        action, _, argument = match[3].partition(":")
        number = getattr(errno, argument, None) if action == "error" else float(argument or 0)
        if number is not None:
            return match[1], int(match[2]) if match[2] else None, action, number
    raise ConfigurationError(
        f"{VARIABLE}: {entry!r} is not name=action or name@N=action, with an action of kill, stop, sleep:SECONDS or "
        f"error:ERRNO"
    )
