"""An S3 server (moto) of this test process, in a process of its own; and what lies there, seen without the package."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import boto3

from support.jobs.scripts import free_port
from support.waiting import await_that

BUCKET = "test-bucket"


@functools.cache
def endpoint() -> str:
    """The URL of the server, which is started at the first call, and has the bucket :data:`BUCKET`."""
    moto = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p"]
    pages = {"MOTO_S3_DEFAULT_MAX_KEYS": "100"}  # of listings: a test of many takes few objects
    url = serve(lambda port: [*moto, str(port)], "/moto-api/", pages)
    urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT")).close()
    return url


_ONE_AT_A_TIME = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
run_simple("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=False)
"""


@functools.cache
def strict_endpoint() -> str:
    """The URL of a server that takes one request at a time, and has the bucket :data:`BUCKET`: moto looks whether an
    object is there, and stores it later, so that two creations at once may both succeed (about once in a thousand
    races, with its server of many threads).
    """
    url = serve(lambda port: [sys.executable, "-c", _ONE_AT_A_TIME, str(port)], "/moto-api/")
    client(url).create_bucket(Bucket=BUCKET)
    return url


def variables(url: str) -> dict[str, str]:
    """The environment of a process whose stores are those of the server at ``url``."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def use(url: str) -> None:
    """Make the stores that this process opens those of the server at ``url``."""
    os.environ.update(variables(url))


_buckets = itertools.count(1)


def bucket_behind(url: str, server: str | None = None, name: str = "faults") -> str:
    """The URL of a new bucket of the server, such as ``s3://faults-1``, which this process reaches at ``url``: a store
    that was opened stays at the address that it had.
    """
    made = f"{name}-{os.getpid()}-{next(_buckets)}"
    client(server).create_bucket(Bucket=made)
    use(url)
    return f"s3://{made}"


def client(url: str | None = None) -> Any:
    """boto3's client of the server."""
    return boto3.client(
        "s3",
        endpoint_url=url or endpoint(),
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )


class Bucket:
    """The objects of a server's bucket."""

    def __init__(self, url: str, name: str = BUCKET) -> None:
        self.name = name
        self._client = client(url)

    def keys(self, prefix: str = "") -> list[str]:
        return sorted(each["Key"] for each in self._objects(prefix))

    def _objects(self, prefix: str) -> Iterator[dict[str, Any]]:
        for page in self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=prefix
        ):
            yield from page.get("Contents", [])

    def get(self, key: str) -> bytes:
        return self._client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self.name, Key=key, Body=data)

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=self.name, Key=key)

    def uploads(self, prefix: str = "") -> list[str]:
        """The keys of multipart uploads that were neither completed nor aborted."""
        found = self._client.list_multipart_uploads(Bucket=self.name)
        keys = [each["Key"] for each in found.get("Uploads", [])]
        return [key for key in keys if key.startswith(prefix)]


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
    """Start ``command(port)`` on a free port of 127.0.0.1; returns its URL as soon as it answers anything at
    ``answers_at``.

    To be called in the main thread: the server ends with the thread that started it.
    """
    port = free_port()
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
