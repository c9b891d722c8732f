"""What the stores behind a library have in common: their requests, and their errors.

A request is sent again while a store is busy, and once more when the credentials have expired.

The libraries repeat a request, too, but say nothing until they give up, minutes later. So they are told to give up
early, and this module goes on: what waits for the store learns what it answers (:func:`bounded.troubled`), work that
was abandoned ends, and credentials are read anew, which no library does for those of the environment or a file.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from dcp_datastates.errors import ConfigurationError, StorageError
from dcp_datastates.storage.bounded import step, troubled
from dcp_datastates.storage.object_path import url_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

ASKED_SECONDS: Final = 60.0
"""From a request's first try to its last: a person may wait, and has perhaps misspelled the server's name."""
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


def says_conflict(message: str) -> bool:
    """Whether a library's error says that another request for this object is under way: nothing was decided."""
    return _CONFLICT.search(message) is not None


class LibraryStore:
    """A store behind a library. Its subclass makes the requests."""

    _errors: tuple[type[Exception], ...] = (Exception,)
    """What the library raises: other errors are not storage's."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url: Final = url
        self._options: Final = options or {}
        self._client: Any = self._open()

    def _open(self) -> Any:
        """The library's client, with the credentials that it finds now. Raises :class:`ConfigurationError`."""
        raise NotImplementedError

    def _storage_error(self, error: Exception, doing: str, url: str) -> StorageError:
        raise NotImplementedError

    def _ask(
        self, doing: str, key: str, request: Callable[[], T], seconds: float = ASKED_SECONDS
    ) -> T:
        """What ``request`` returns, which takes the client anew each time. While the store is busy, it is sent again,
        for ``seconds`` at most; once more after the credentials have expired, if they could be read anew.

        Raises the last error. Any thread. In work that was abandoned, nothing is sent.
        """
        step()
        began, wait = time.monotonic(), _FIRST_WAIT
        renewed = said = False
        while True:
            used = self._client
            try:
                with self._explained(doing, key):
                    return request()
            except ExpiredError as error:
                if not renewed and self._renew(used):
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
            _pause(wait * random.uniform(0.5, 1))
            wait = min(3 * wait, _LONGEST_WAIT)

    def _renew(self, used: Any) -> bool:
        """Read the credentials anew, unless another thread has done so since the client ``used`` was made."""
        with contextlib.suppress(ConfigurationError):
            if self._client is used:
                self._client = self._open()
            return True
        return False

    @contextlib.contextmanager
    def _explained(self, doing: str, key: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except self._errors as error:
            # Without the cause: its text may have credentials.
            raise self._storage_error(error, doing, url_of(self.url, key)) from None

    def _failed(self, error: Exception, doing: str, number: int, url: str) -> StorageError:
        """The usual error: one that passes, if the library's says so."""
        said = self._said(error)
        text = f"{doing} failed: {said}"
        if says_conflict(str(error)):
            return BusyError(errno.EAGAIN, text, url)
        return (ExpiredError if _EXPIRED.search(said) else StorageError)(number, text, url)

    def _said(self, error: Exception) -> str:
        return without_secrets(str(error), secrets_in(self._options)) or type(error).__name__


def _pause(seconds: float) -> None:
    over = time.monotonic() + seconds
    while (left := over - time.monotonic()) > 0:
        time.sleep(min(left, _SLICE))
        troubled(None)  # abandoned work ends here


# ---- secrets -------------------------------------------------------------------------------------


_DOCUMENT: Final = re.compile(r"(?:<\?xml[^>]*\?>\s*)?<Error>.*?</Error>", re.DOTALL)
_CODE_AND_MESSAGE: Final = re.compile(r"<(?:Code|Message)>(.*?)</(?:Code|Message)>", re.DOTALL)
_QUERY: Final = re.compile(r"(https?://[^\s?\"']+)\?[^\s\"']*")
_USER: Final = re.compile(r"(\b\w+://)[^/\s@]+@")  # \b: else a long word takes quadratic time
_NAME = r"\b\w*(?:secret|token|passw(?:or)?d|pwd|signature|credential|authorization|private_key)\w*"
_QUOTED = r"\"(?:[^\"\\]|\\.)*\"|'[^']*'"
_SECRET: Final = re.compile(
    rf"(?i)((?:{_NAME}|\b\w*key(?:_id)?|sig)[\"']?\s*[=:]\s*)"
    rf"(?:Some\()?(?:(?:Bearer|Basic)\s+)?(?:{_QUOTED}|[^\s\"',;)&]+)"
    rf"|({_NAME}\s+)(?:{_QUOTED}|(?=[^\s\"',;)&]*\d)[^\s\"',;)&]{{8,}})"
)
"""``name=value`` and its like; or a name and what is quoted, or what has digits and is no word."""


def secrets_in(options: Mapping[str, Any]) -> Iterator[str]:
    """The values of ``storage_options`` whose names say that they are secrets."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from secrets_in(value)
        elif value and _SECRET.match(f"{name}={value}"):
            yield str(value)


def without_secrets(message: str, known: Iterable[str] = ()) -> str:
    """A message without what may be a secret: those that are ``known``, queries of URLs, users in URLs, values of keys
    and tokens; of a server's answer, which may repeat what was sent, the error's code and message.
    """
    for secret in known:
        message = message.replace(secret, "…")
    message = message.partition("\n\nDebug source")[0]
    message = _DOCUMENT.sub(lambda found: ": ".join(_CODE_AND_MESSAGE.findall(found[0])), message)
    return _SECRET.sub(r"\1\2…", _USER.sub(r"\1…@", _QUERY.sub(r"\1?…", message)))
