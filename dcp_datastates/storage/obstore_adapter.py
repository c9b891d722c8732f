"""S3, GCS and Azure, by the library obstore (the Rust crate object_store).

Credentials, region and endpoint come from the environment, as each provider's tools read it, or from the machine's
role: ``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_NAME``.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

import obstore
from obstore import exceptions
from obstore.store import from_url
from typing_extensions import Buffer

from dcp_datastates.errors import ConfigurationError, StorageError
from dcp_datastates.storage.object_store import Listing, ObjectMissingError, StoredObject
from dcp_datastates.storage.store_calls import (
    ASKED_SECONDS,
    BusyError,
    ExpiredError,
    LibraryStore,
    says_conflict,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TIMEOUT: Final = timedelta(seconds=60)
"""For one request, of at most one part."""
_CONNECT_TIMEOUT: Final = timedelta(seconds=10)
_WRITE_SECONDS: Final = 270.0
"""From the first try to the last of a request that changes something."""
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
    calls: Any
    """Gives up early."""
    patient: Any
    """Repeats requests by itself: the pieces of an upload cannot be sent again from the beginning. Deletes each object
    by a request of its own.
    """


class ObstoreStore(LibraryStore):
    """An :class:`~dcp_datastates.storage.object_store.ObjectStore`."""

    _errors = (exceptions.BaseError, ValueError, OSError)

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._most_deleted: Final = 1000 if url.startswith("s3") else 256
        """The most objects that one request deletes."""
        self._deletes_many = True
        """Whether one request deletes several. False once the server has refused that, and has deleted one by one."""

    def _open(self) -> _Clients:
        client: dict[str, Any] = {"timeout": _TIMEOUT, "connect_timeout": _CONNECT_TIMEOUT}
        endpoints = (
            os.environ.get(name, "")
            for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
        )
        if any(endpoint.startswith("http://") for endpoint in endpoints):
            client["allow_http"] = True
        options: dict[str, Any] = {"client_options": client}
        if (provider := _aws_credentials(self.url)) is not None:
            options["credential_provider"] = provider
        short, long = _retries(_LIBRARY_TRIES, ASKED_SECONDS), _retries(10_000, _WRITE_SECONDS)
        try:
            calls: Any = from_url(self.url, retry_config=short, **options)
            if self.url.startswith("s3"):
                options["config"] = {"disable_bulk_delete": True}
            return _Clients(calls, from_url(self.url, retry_config=long, **options))
        except (exceptions.BaseError, ValueError) as error:
            raise ConfigurationError(f"{self.url} cannot be opened: {self._said(error)}") from None

    def put(self, key: str, data: Buffer) -> None:
        content = bytes(data)  # the library takes other buffers for iterables
        self._ask(
            "storing",
            key,
            lambda: obstore.put(self._client.calls, key, content, use_multipart=False),
            _WRITE_SECONDS,
        )

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        content = bytes(data)  # the library takes other buffers for iterables

        def put() -> bool:
            try:
                obstore.put(self._client.calls, key, content, mode="create")
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
                if says_conflict(str(error)):
                    raise
                return False
            return True

        return self._ask("storing", key, put, _WRITE_SECONDS)

    def put_stream(
        self, key: str, pieces: Iterator[Buffer], *, part_bytes: int, parts_in_flight: int
    ) -> None:
        client = self._client
        failures: list[Exception] = []

        def noted() -> Iterator[Buffer]:
            try:
                yield from pieces
            except Exception as error:
                failures.append(error)
                raise

        try:
            with self._explained("storing", key):
                try:
                    obstore.put(
                        client.patient,
                        key,
                        noted(),
                        use_multipart=True,
                        chunk_size=part_bytes,
                        max_concurrency=parts_in_flight,
                    )
                except Exception:
                    # Where aborting the upload fails as well, the library raises only that error.
                    if failures:
                        raise failures.pop() from None
                    raise
        except ExpiredError:
            self._renew(client)  # for the next upload
            raise

    def get(self, key: str) -> bytes:
        return self._ask(
            "reading", key, lambda: bytes(obstore.get(self._client.calls, key).bytes())
        )

    def get_range(self, key: str, begin: int, end: int) -> Buffer:
        if end <= begin:
            return b""
        data = self._ask(
            "reading", key, lambda: obstore.get_range(self._client.calls, key, start=begin, end=end)
        )
        return memoryview(data)[: end - begin]

    def size(self, key: str) -> int:
        return int(
            self._ask("looking at", key, lambda: obstore.head(self._client.calls, key))["size"]
        )

    def list(self, prefix: str) -> Listing:
        below = f"{prefix}/" if prefix else None
        found = self._ask(
            "listing", prefix, lambda: obstore.list_with_delimiter(self._client.calls, below)
        )
        folders = (each.rstrip("/").rpartition("/")[2] for each in found["common_prefixes"])
        objects = (
            StoredObject(each["path"], int(each["size"]), each["last_modified"].timestamp())
            for each in found["objects"]
            if each["path"] != prefix  # whose key ends in a slash: a console shows it as a folder
        )
        return Listing(tuple(sorted(folders)), tuple(objects))

    def delete(self, keys: Iterable[str]) -> None:
        names = list(keys)
        if not self._deletes_many:
            self._delete(names, lambda: self._client.patient)
            return
        try:
            self._delete(names, lambda: self._client.calls)
        except (BusyError, ExpiredError):
            raise
        except StorageError as refusal:
            self._delete(names, lambda: self._client.patient)
            self._deletes_many = False
            logger.info(
                "%s does not take requests that delete several objects, so each is deleted by one of its own: %s",
                self.url,
                refusal.strerror,
            )

    def _delete(self, names: Sequence[str], client: Callable[[], Any]) -> None:
        for at in range(0, len(names), self._most_deleted):
            batch = names[at : at + self._most_deleted]
            self._ask("deleting", batch[0], partial(_delete, client, batch), _WRITE_SECONDS)

    def _storage_error(self, error: Exception, doing: str, url: str) -> StorageError:
        # What is missing when an object is stored is the bucket, or the upload.
        if isinstance(error, FileNotFoundError) and doing != "storing":
            return ObjectMissingError(url)
        text = str(error)
        if "non-partial response" in text:
            return StorageError(
                errno.EOPNOTSUPP,
                "the server answers a request for a range otherwise than HTTP says (with status 206): objects can be "
                "stored there, but not read in ranges, as every load does",
                url,
            )
        number = next((n for kind, n in _ERRNO.items() if isinstance(error, kind)), errno.EIO)
        if _BUSY.search(text):
            said = _REASON.sub("", self._said(error))
            return BusyError(number, f"{doing} failed: {said}", url)
        if "AccessDenied" in text:  # of one of several objects
            number = errno.EACCES
        return self._failed(error, doing, number, url)


def _delete(client: Callable[[], Any], names: Sequence[str]) -> None:
    try:
        obstore.delete(client(), names)
    except FileNotFoundError:  # at the first that is missing, the library leaves the others
        for name in names if len(names) > 1 else ():
            _delete(client, [name])


def _retries(tries: int, seconds: float) -> Any:
    return {"max_retries": tries, "retry_timeout": timedelta(seconds=seconds), "backoff": _BACKOFF}


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
