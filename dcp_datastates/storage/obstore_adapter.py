"""S3, GCS and Azure, by the library obstore (the Rust crate object_store).

Credentials, region and endpoint come from the environment, as each provider's tools read it, or from the machine's
role: ``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_NAME``.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, Final

import obstore
from obstore import exceptions
from obstore.store import from_url
from typing_extensions import Buffer

from dcp_datastates.errors import ConfigurationError, StorageError
from dcp_datastates.storage.object_store import (
    Listing,
    ObjectMissingError,
    StoredObject,
    Version,
    without_secrets,
)

__all__ = ["ObstoreStore"]

_TIMEOUT: Final = timedelta(seconds=60)
"""For one request, of at most one part."""
_CONNECT_TIMEOUT: Final = timedelta(seconds=10)
_WRITE_RETRY_TIMEOUT: Final = timedelta(seconds=270)
"""From a request's first try to its last retry: the library asks for less than five minutes, since it does not renew
credentials between retries.
"""
_READ_RETRY_TIMEOUT: Final = timedelta(seconds=60)
"""The same of requests that change nothing: a person may wait, and has perhaps misspelled the server's name."""
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


class ObstoreStore:
    """An :class:`~dcp_datastates.storage.object_store.ObjectStore`."""

    def __init__(self, url: str) -> None:
        self.url: Final = url
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
        try:
            self._writes: Any = from_url(
                url, retry_config=_retries(_WRITE_RETRY_TIMEOUT), **options
            )
            self._reads: Any = from_url(url, retry_config=_retries(_READ_RETRY_TIMEOUT), **options)
        except (exceptions.BaseError, ValueError) as error:
            raise ConfigurationError(
                f"{url} cannot be opened: {without_secrets(str(error))}"
            ) from None

    def put(self, key: str, data: Buffer) -> None:
        with self._explained("storing", key):
            obstore.put(self._writes, key, bytes_like(data), use_multipart=False)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        with self._explained("storing", key):
            try:
                obstore.put(self._writes, key, bytes_like(data), mode="create")
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                return False
        return True

    def put_if_unchanged(self, key: str, data: Buffer, version: Version | None) -> bool:
        if version is None:
            return self.put_if_absent(key, data)
        with self._explained("storing", key):
            try:
                known = {"e_tag": version.e_tag, "version": version.number}
                mode: Any = {name: value for name, value in known.items() if value is not None}
                obstore.put(self._writes, key, bytes_like(data), mode=mode)
            except (exceptions.PreconditionError, exceptions.AlreadyExistsError):
                return False
            except FileNotFoundError:  # what was to be replaced is gone
                return False
        return True

    def put_stream(
        self, key: str, pieces: Iterator[Buffer], *, part_bytes: int, parts_in_flight: int
    ) -> None:
        with self._explained("storing", key):
            obstore.put(
                self._writes,
                key,
                pieces,
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=parts_in_flight,
            )

    def get(self, key: str) -> tuple[bytes, Version, float]:
        with self._explained("reading", key):
            result = obstore.get(self._reads, key)
            meta = result.meta
            data = bytes(result.bytes())
        return data, Version(meta["e_tag"], meta["version"]), meta["last_modified"].timestamp()

    def get_range(self, key: str, begin: int, end: int) -> Buffer:
        if end <= begin:
            return b""
        with self._explained("reading", key):
            data = memoryview(obstore.get_range(self._reads, key, start=begin, end=end))
        return data[: end - begin]

    def size(self, key: str) -> int:
        with self._explained("looking at", key):
            return int(obstore.head(self._reads, key)["size"])

    def list(self, prefix: str) -> Listing:
        with self._explained("listing", prefix):
            found = obstore.list_with_delimiter(self._reads, f"{prefix}/" if prefix else None)
        return Listing(
            tuple(
                sorted(folder.rstrip("/").rpartition("/")[2] for folder in found["common_prefixes"])
            ),
            tuple(_objects(found["objects"], prefix)),
        )

    def walk(self, prefix: str) -> Iterator[StoredObject]:
        with self._explained("listing", prefix):
            for batch in obstore.list(
                self._reads, f"{prefix}/" if prefix else None, chunk_size=1000
            ):
                yield from _objects(batch, prefix)

    def delete(self, keys: Iterable[str]) -> None:
        if names := list(keys):
            with self._explained("deleting", names[0]), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._writes, names)

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
            raise StorageError(
                number, f"{doing} failed: {without_secrets(str(error))}", url
            ) from None


def _retries(seconds: timedelta) -> Any:
    return {"max_retries": 10_000, "retry_timeout": seconds, "backoff": _BACKOFF}


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
