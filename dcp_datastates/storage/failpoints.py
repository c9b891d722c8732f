"""Named places where a test, or an operator rehearsing an outage, can make this process fail.

``DCP_DATASTATES_FAILPOINTS`` contains ``name=action`` entries separated by ``;``. The process reads them at its first
failpoint, or when it constructs its engine, which keeps them::

    publish.rename.before=kill;flush.write.after@3=error:EIO;vote.before=sleep:5

If the variable is unset, a failpoint does nothing. CONTRIBUTING.md has the actions, and the log of those that fired.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Final

from dcp_datastates._native import Failpoints
from dcp_datastates.errors import ConfigurationError

VARIABLE: Final = "DCP_DATASTATES_FAILPOINTS"
LOG_VARIABLE: Final = "DCP_DATASTATES_FAILPOINTS_LOG"

_ENTRY: Final = re.compile(
    r"([a-z_.]+)(?:@([0-9]{1,18}))?=(kill|stop|sleep:[0-9]*\.?[0-9]+|error:E[A-Z0-9]+)"
)

_failpoints: Failpoints | None = None


def hit(name: str) -> None:
    """Carry out the environment's action for the failpoint ``name``. Raises OSError for an ``error`` action."""
    number = current().hit(name)
    if number:
        raise OSError(number, f"{os.strerror(number)} (failpoint {name})")


def current() -> Failpoints:
    """This process's failpoints. Raises as :func:`reload` does."""
    return _failpoints or reload()


def reload() -> Failpoints:
    """Read the environment again; raises :class:`ConfigurationError` for an invalid entry."""
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
