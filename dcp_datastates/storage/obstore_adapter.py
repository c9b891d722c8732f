"""S3, GCS and Azure, by the library obstore (the Rust crate object_store).

Credentials, region and endpoint come from the environment, as each provider's tools read it, or from the machine's
role: ``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_NAME``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import obstore
from obstore import exceptions
from obstore.store import from_url
from typing_extensions import Buffer

from dcp_datastates.errors import ConfigurationError, StorageError
from dcp_datastates.storage.object_store import (
    Listing,
    ObjectMissingError,
    StoredObject,
    without_secrets,
)
from dcp_datastates.storage.store_calls import (
    BusyError,
    ExpiredError,
    patiently,
    says_conflict,
    says_expired,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TIMEOUT: Final = timedelta(seconds=60)
"""For one request, of at most one part."""
_CONNECT_TIMEOUT: Final = timedelta(seconds=10)
_WRITE_SECONDS: Final = 270.0
"""From a request's first try to its last."""
_READ_SECONDS: Final = 60.0
"""The same of requests that change nothing: a person may wait, and has perhaps misspelled the server's name."""
_LIBRARY_TRIES: Final = 2
"""Of the library's own, before this package looks at what the store says (:mod:`store_calls`)."""
_BACKOFF: Final = {
    "init_backoff": timedelta(seconds=0.1),
    "max_backoff": timedelta(seconds=10),
    "base": 3,  # the library draws the next wait from [init, base * last]: with 2, waits shrink on average
}

_ERRNO: Final = {
    exceptions.PermissionDeniedError: errno.EACCES,
    exceptions.UnauthenticatedError: errno.EACCES,
    exceptions.NotSupportedError: errno.EOPNOTSUPP,
}

_BUSY: Final = re.compile(r"status code: (?:5(?!01)\d\d|429)|HTTP error: ")
_REASON: Final = re.compile(r".*status code: |.*HTTP error: ", re.DOTALL)


@dataclass(frozen=True)
class _Clients:
    """The library's clients, with the credentials of one moment."""

    calls: Any
    """Gives up early."""
    streams: Any
    """Repeats the parts of an upload by itself: the pieces cannot be sent again from the beginning."""
    single: Any
    """As ``calls``, and deletes one object by a request."""


class ObstoreStore:
    """An :class:`~dcp_datastates.storage.object_store.ObjectStore`."""

    def __init__(self, url: str) -> None:
        self.url: Final = url
        self._lock = threading.RLock()  # guards what follows
        self._clients = _open(url)
        self._most_deleted: Final = 1000 if url.startswith("s3") else 256
        """The most objects that one request deletes."""
        self.deletes_many: bool | None = None

    def put(self, key: str, data: Buffer) -> None:
        content = bytes_like(data)
        self._write(
            "storing", key, lambda own: obstore.put(own.calls, key, content, use_multipart=False)
        )

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        content = bytes_like(data)

        def put(own: _Clients) -> bool:
            try:
                obstore.put(own.calls, key, content, mode="create")
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
                if says_conflict(str(error)):
                    raise
                return False
            return True

        return self._write("storing", key, put)

    def put_stream(
        self, key: str, pieces: Iterator[Buffer], *, part_bytes: int, parts_in_flight: int
    ) -> None:
        clients = self._clients
        failures: list[Exception] = []
        try:
            with self._explained("storing", key), _own_failures_first(failures):
                obstore.put(
                    clients.streams,
                    key,
                    _noting_failures(pieces, failures),
                    use_multipart=True,
                    chunk_size=part_bytes,
                    max_concurrency=parts_in_flight,
                )
        except ExpiredError:
            self._renew(clients)  # for the next upload
            raise

    def get(self, key: str) -> tuple[bytes, float]:
        def get(own: _Clients) -> tuple[bytes, float]:
            result = obstore.get(own.calls, key)
            return bytes(result.bytes()), result.meta["last_modified"].timestamp()

        return self._read("reading", key, get)

    def get_range(self, key: str, begin: int, end: int) -> Buffer:
        if end <= begin:
            return b""
        data = self._read(
            "reading", key, lambda own: obstore.get_range(own.calls, key, start=begin, end=end)
        )
        return memoryview(data)[: end - begin]

    def size(self, key: str) -> int:
        return int(self._read("looking at", key, lambda own: obstore.head(own.calls, key))["size"])

    def list(self, prefix: str) -> Listing:
        below = f"{prefix}/" if prefix else None
        found = self._read(
            "listing", prefix, lambda own: obstore.list_with_delimiter(own.calls, below)
        )
        return Listing(
            tuple(
                sorted(folder.rstrip("/").rpartition("/")[2] for folder in found["common_prefixes"])
            ),
            tuple(_objects(found["objects"], prefix)),
        )

    def delete(self, keys: Iterable[str]) -> None:
        names = list(keys)
        if not names:
            return
        if self.deletes_many is not False:
            seconds = _WRITE_SECONDS if self.deletes_many else 0.0
            try:
                self._delete(names, lambda own: own.calls, seconds)
            except StorageError as error:
                if self.deletes_many:
                    raise
                refusal = error
            else:
                self.deletes_many = True
                return
        self._delete(names, lambda own: own.single, _WRITE_SECONDS)
        if self.deletes_many is None and not isinstance(refusal, BusyError):
            self.deletes_many = False
            logger.info(
                "%s does not take requests that delete several objects, so each is deleted by one of its own: %s",
                self.url,
                refusal.strerror,
            )

    def _delete(
        self, names: Sequence[str], client: Callable[[_Clients], Any], seconds: float
    ) -> None:
        for at in range(0, len(names), self._most_deleted):
            batch = names[at : at + self._most_deleted]

            def delete(own: _Clients, batch: Sequence[str] = batch) -> None:
                _delete(client(own), batch)

            self._ask("deleting", batch[0], delete, seconds)

    # ---- within ------------------------------------------------------------------------------------

    def _write(self, doing: str, key: str, request: Callable[[_Clients], T]) -> T:
        return self._ask(doing, key, request, _WRITE_SECONDS)

    def _read(self, doing: str, key: str, request: Callable[[_Clients], T]) -> T:
        return self._ask(doing, key, request, _READ_SECONDS)

    def _ask(self, doing: str, key: str, request: Callable[[_Clients], T], seconds: float) -> T:
        clients = self._clients

        def ask() -> T:
            nonlocal clients
            clients = self._clients
            with self._explained(doing, key):
                return request(clients)

        return patiently(ask, seconds, lambda: self._renew(clients))

    def _renew(self, used: _Clients) -> bool:
        """Read the credentials anew, unless another thread has done so since ``used`` was made."""
        with contextlib.suppress(ConfigurationError):
            if self._clients is used:
                self._clients = _open(self.url)
            return True
        return False

    @contextlib.contextmanager
    def _explained(self, doing: str, key: str) -> Iterator[None]:
        url = f"{self.url}/{key}"
        try:
            yield
        except StorageError:
            raise
        except (exceptions.BaseError, ValueError, OSError) as error:
            if (
                isinstance(error, FileNotFoundError) and doing != "storing"
            ):  # then the bucket is, or an upload
                raise ObjectMissingError(url) from None
            if "non-partial response" in str(error):
                raise StorageError(
                    errno.EOPNOTSUPP,
                    "the server answers a request for a range otherwise than HTTP says (with status 206): objects can "
                    "be stored there, but not read in ranges, as every load does",
                    url,
                ) from None
            # Without the cause: its text may have credentials.
            number = next((n for kind, n in _ERRNO.items() if isinstance(error, kind)), errno.EIO)
            text = str(error)
            said = without_secrets(text)
            if _BUSY.search(text):
                raise BusyError(number, f"{doing} failed: {_REASON.sub('', said)}", url) from None
            if says_conflict(text):
                raise BusyError(errno.EAGAIN, f"{doing} failed: {said}", url) from None
            if says_expired(said):
                raise ExpiredError(number, f"{doing} failed: {said}", url) from None
            if "AccessDenied" in text:  # of one of several objects
                number = errno.EACCES
            raise StorageError(number, f"{doing} failed: {said}", url) from None


def _noting_failures(pieces: Iterator[Buffer], failures: list[Exception]) -> Iterator[Buffer]:
    try:
        yield from pieces
    except Exception as error:
        failures.append(error)
        raise


@contextlib.contextmanager
def _own_failures_first(failures: list[Exception]) -> Iterator[None]:
    """Raise what the pieces raised: where aborting the upload fails as well, the library raises only that error."""
    try:
        yield
    except Exception as error:
        if failures and failures[0] is not error:
            raise failures[0] from error
        raise
    finally:
        failures.clear()


def _delete(client: Any, names: Sequence[str]) -> None:
    try:
        obstore.delete(client, names)
    except FileNotFoundError:  # at the first that is missing, the library leaves the others
        for name in names if len(names) > 1 else ():
            _delete(client, [name])


def _open(url: str) -> _Clients:
    """Clients with the credentials that the environment, a file or a provider has now. Asks no server, but a provider
    may.
    """
    client: dict[str, Any] = {"timeout": _TIMEOUT, "connect_timeout": _CONNECT_TIMEOUT}
    endpoints = (
        os.environ.get(name, "")
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
    )
    if any(endpoint.startswith("http://") for endpoint in endpoints):
        client["allow_http"] = True
    options: dict[str, Any] = {"client_options": client}
    if (provider := _aws_credentials(url)) is not None:
        options["credential_provider"] = provider
    short, long = _retries(_LIBRARY_TRIES, _READ_SECONDS), _retries(10_000, _WRITE_SECONDS)
    try:
        calls: Any = from_url(url, retry_config=short, **options)
        streams: Any = from_url(url, retry_config=long, **options)
        if url.startswith("s3"):
            options["config"] = {"disable_bulk_delete": True}
        single: Any = from_url(url, retry_config=short, **options)
    except (exceptions.BaseError, ValueError) as error:
        raise ConfigurationError(f"{url} cannot be opened: {without_secrets(str(error))}") from None
    return _Clients(calls, streams, single)


def _retries(tries: int, seconds: float) -> Any:
    return {
        "max_retries": tries,
        "retry_timeout": timedelta(seconds=seconds),
        "backoff": _BACKOFF,
    }


_AWS_SOURCES: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
"""Variables of the environment by which obstore itself finds credentials."""


def _aws_credentials(url: str) -> Any:
    """boto3's search for credentials (profiles, single sign-on, the machine's role), where the environment has none and
    boto3 is installed: obstore would ask the machine for minutes. None: obstore's own search.
    """
    if not url.startswith("s3") or any(name in os.environ for name in _AWS_SOURCES):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    try:
        return Boto3CredentialProvider()
    except Exception as error:
        raise ConfigurationError(
            f"{url} needs credentials, and none were found ({type(error).__name__}): set AWS_ACCESS_KEY_ID and "
            f"AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role; AWS_SKIP_SIGNATURE=true is for public buckets"
        ) from None


def bytes_like(data: Buffer) -> Buffer:
    """``data`` in a form that obstore takes for bytes, not for an iterable of them."""
    return data if isinstance(data, bytes) else bytes(data)


def _objects(found: Iterable[Any], prefix: str) -> Iterator[StoredObject]:
    for meta in found:
        if (
            meta["path"] != prefix
        ):  # an object whose key ends in a slash: a console shows it as a folder
            yield StoredObject(meta["path"], int(meta["size"]), meta["last_modified"].timestamp())
