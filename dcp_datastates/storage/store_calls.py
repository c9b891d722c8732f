"""Requests that are sent again while a store is busy, and once more when the credentials have expired.

The libraries repeat a request, too, but say nothing until they give up, minutes later. So they are told to give up
early, and this module goes on: what waits for the store learns what it answers (:func:`bounded.troubled`), work that
was abandoned ends, and credentials are read anew, which no library does for those of the environment or a file.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable
from typing import Final, TypeVar

from dcp_datastates.errors import StorageError
from dcp_datastates.storage.bounded import step, troubled

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_WAIT: Final = 0.1
_LONGEST_WAIT: Final = 10.0
_SLICE: Final = 0.25
_SAID_AFTER: Final = 10.0
"""Seconds. An answer that comes sooner is no news."""

_EXPIRED: Final = re.compile(
    r"ExpiredToken|RequestExpired|TokenRefreshRequired|InvalidAccessKeyId|AuthenticationFailed|"
    r"token\b.{0,20} expired|Unauthorized|Unauthenticated",
    re.IGNORECASE,
)

_CONFLICT: Final = re.compile(r"ConditionalRequestConflict|OperationAborted")


class BusyError(StorageError):
    """The store cannot carry out the request now, or does not answer: a later one may succeed."""


class ExpiredError(StorageError):
    """The credentials have expired, or were replaced."""


def says_expired(message: str) -> bool:
    """Whether a library's error says that other credentials may help."""
    return _EXPIRED.search(message) is not None


def says_conflict(message: str) -> bool:
    """Whether a library's error says that another request for this object is under way: nothing was decided."""
    return _CONFLICT.search(message) is not None


def patiently(ask: Callable[[], T], seconds: float, renew: Callable[[], bool]) -> T:
    """Return what ``ask`` returns, which sends a request. While it raises :class:`BusyError`, ask again, for
    ``seconds`` at most; after :class:`ExpiredError` once, if ``renew`` has read the credentials anew.

    Raises what ``ask`` raises in the end. Any thread. In work that was abandoned, nothing is sent.
    """
    step()
    began, wait = time.monotonic(), _FIRST_WAIT
    renewed = said = False
    while True:
        try:
            return ask()
        except ExpiredError as error:
            if not renewed and renew():
                renewed = True
                continue
            raise ExpiredError(
                error.errno,
                f"{error.strerror}; the credentials were read again from where they come from (the environment, a "
                f"file, the machine's role or a provider), and do not help either: renew them there, and the next "
                f"request takes them",
                error.filename,
            ) from None
        except BusyError as error:
            waited = time.monotonic() - began
            answer = f"{error.strerror} (for {waited:.0f} s)"
            if waited >= seconds:
                raise BusyError(error.errno, answer, error.filename) from None
            troubled(answer)
            if waited >= _SAID_AFTER and not said:
                said = True
                logger.warning("%s; asking again for up to %.0f s", error, seconds)
        over = time.monotonic() + wait * random.uniform(0.5, 1)
        while (left := over - time.monotonic()) > 0:
            time.sleep(min(left, _SLICE))
            troubled(None)  # abandoned work ends here
        wait = min(3 * wait, _LONGEST_WAIT)
