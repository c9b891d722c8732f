"""An S3 server (moto) of this test process, in a process of its own; and what lies there, seen without the package."""

from __future__ import annotations

import functools
import os
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import boto3

from support.stores.programs import serve

__all__ = ["BUCKET", "Bucket", "client", "endpoint", "use", "variables"]

BUCKET = "test-bucket"


@functools.cache
def endpoint() -> str:
    """The URL of the server, which is started at the first call, and has the bucket :data:`BUCKET`."""
    url = serve(
        lambda port: [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        "/moto-api/",
    )
    urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT")).close()
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
