"""File systems of fsspec with habits that a store must not have."""

from __future__ import annotations

import gc
from typing import ClassVar

import fsspec
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from dcp_datastates.errors import ConfigurationError, StorageError
from dcp_datastates.storage.fsspec_adapter import FsspecStore


class LibraryError(Exception):
    """Of no kind that Python knows, as those of many libraries."""


class PublishingFile(AbstractBufferedFile):
    """Publishes what it has when it is closed, whatever ``autocommit`` says."""

    def _upload_chunk(self, final=False):
        self.parts = [*getattr(self, "parts", ()), self.buffer.getvalue()]
        if self.fs.full:
            raise LibraryError("quota of user with token=very-secret is exceeded")
        if final:
            self.fs.objects[self.path] = b"".join(self.parts)
        return True


class PublishingFiles(AbstractFileSystem):
    protocol = "publishing"
    made: ClassVar[list[PublishingFiles]] = []

    def __init__(self, host="", full=False, **options):
        super().__init__(**options)
        assert not {"use_listings_cache", "skip_instance_cache"} & set(options)
        self.made.append(self)
        self.host = host
        self.full = full
        self.objects = {}
        self.listed = 0

    @staticmethod
    def _get_kwargs_from_urls(url):
        return {"host": url.partition("://")[2].partition("/")[0]}

    def _open(self, path, mode="rb", block_size=None, autocommit=True, **options):
        return PublishingFile(self, path, mode, block_size, autocommit, **options)

    def ls(self, path, detail=True, **options):
        if path not in self.dircache:
            self.listed += 1
            self.dircache[path] = []
        return [
            {"name": name, "size": len(data), "type": "file"} for name, data in self.objects.items()
        ]

    def rm_file(self, path):
        if path not in self.objects:
            raise FileNotFoundError(path)
        del self.objects[path]


@pytest.fixture(autouse=True)
def _registered():
    fsspec.register_implementation("publishing", PublishingFiles, clobber=True)


def stream(store, pieces):
    store.put_stream("a", pieces, part_bytes=8, parts_in_flight=2)


def test_a_file_that_publishes_when_it_is_closed_does_not_after_an_error():
    store = FsspecStore("publishing://host", None)
    files = PublishingFiles.made[-1]

    def pieces():
        yield b"0123456789"
        yield b"more"
        raise LookupError

    with pytest.raises(LookupError):
        stream(store, pieces())
    gc.collect()
    assert files.objects == {}
    stream(store, iter([b"0123456789", b"more"]))
    assert list(files.objects.values()) == [b"0123456789more"]


def test_errors_of_a_library_are_storage_errors_without_secrets():
    store = FsspecStore("publishing://host", {"full": True})
    with pytest.raises(StorageError, match="quota") as raised:
        stream(store, iter([b"0123456789"]))
    assert "very-secret" not in str(raised.value)
    assert raised.value.filename == "publishing://host/a"


def test_the_host_of_the_url_is_passed_on_and_listings_are_never_cached():
    store = FsspecStore("publishing://host", None)
    store.list("run")
    store.list("run")
    assert PublishingFiles.made[-1].listed == 2
    assert PublishingFiles.made[-1].host == "host"
    FsspecStore("publishing://host", {"host": "other"})
    assert PublishingFiles.made[-1].host == "other"


class ExpiringFiles(PublishingFiles):
    """Takes the token of its environment when it is made."""

    protocol = "expiring"
    token = valid = "1"
    objects_of_all: ClassVar[dict[str, bytes]] = {}

    def __init__(self, **options):
        super().__init__(**options)
        self.objects = self.objects_of_all
        self.own = ExpiringFiles.token

    def check(self):
        if self.own != ExpiringFiles.valid:
            raise PermissionError("The provided token has expired.")

    def pipe_file(self, path, value, mode="overwrite", **options):
        self.check()
        self.objects[path] = value

    def cat_file(self, path, start=None, end=None, **options):
        self.check()
        return self.objects[path][start:end]


def test_credentials_that_have_expired_are_read_again(monkeypatch):
    fsspec.register_implementation("expiring", ExpiringFiles, clobber=True)
    monkeypatch.setattr(ExpiringFiles, "token", "1")
    monkeypatch.setattr(ExpiringFiles, "valid", "1")
    store = FsspecStore("expiring://host", None)
    store.put("a", b"old")
    for token, call in (("2", lambda: store.put("a", b"new")), ("3", lambda: store.get("a"))):
        monkeypatch.setattr(ExpiringFiles, "valid", token)
        with pytest.raises(StorageError, match=r"has expired.*credentials were read again"):
            call()
        monkeypatch.setattr(ExpiringFiles, "token", token)
        call()


def test_a_scheme_or_an_option_that_is_not_known_is_refused_without_the_options():
    with pytest.raises(ConfigurationError, match="nowhere"):
        FsspecStore("nowhere://host", None)
    with pytest.raises(ConfigurationError, match="cannot be opened") as raised:
        FsspecStore("s3://bucket", {"secret": "very-secret", "anon": 1})
    assert "very-secret" not in str(raised.value)
