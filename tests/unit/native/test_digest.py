"""``Engine.digest``: a digest of all bytes of each chunk, wherever it lies, and nothing written."""

from __future__ import annotations

import os

import pytest

from dcp_datastates._native import (
    DIGEST_BLOCK_BYTES,
    MIN_HOST_CACHE_BYTES,
    SEGMENT_BYTES,
    Engine,
    SaveFile,
    Transfer,
    Window,
)


@pytest.fixture
def engine():
    made = Engine(MIN_HOST_CACHE_BYTES)
    yield made
    made.shutdown()


def _job(engine, chunks, window=None, **more):
    content, offsets, offset = Transfer(), [], 0
    for chunk in chunks:
        offsets.append(offset)
        if chunk:
            content.add_buffer(offset, chunk)
        offset += len(chunk) + -len(chunk) % DIGEST_BLOCK_BYTES
    stream = SaveFile("only a name", offset, content)
    sizes = list(map(len, chunks))
    return engine.digest(stream, offsets, sizes, 1, window or Window(0.0), chunks, **more)


def _digests(engine, *chunks):
    job = _job(engine, chunks)
    assert job.wait(60)
    assert job.fault is None
    return job.digests()


def test_a_digest_does_not_depend_on_where_the_chunk_is(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    large, small = os.urandom(3 * SEGMENT_BYTES + 12_345), os.urandom(77)
    (one,) = _digests(engine, large)
    (other,) = _digests(engine, small)
    assert _digests(engine, small, b"", large, small) == [other, bytes(16), one, other]
    assert len(one) == 16
    assert os.listdir() == []


@pytest.mark.parametrize(
    "at", [0, SEGMENT_BYTES - 1, SEGMENT_BYTES, 2 * SEGMENT_BYTES + 12_344, 4095, 4096]
)
def test_every_byte_counts(engine, at):
    data = bytearray(os.urandom(2 * SEGMENT_BYTES + 12_345))
    (before,) = _digests(engine, bytes(data))
    data[at] ^= 0x80
    assert _digests(engine, bytes(data)) != [before]


def test_another_engine_has_another_key(engine):
    other = Engine(MIN_HOST_CACHE_BYTES)
    assert _digests(engine, b"data") != _digests(other, b"data")
    other.shutdown()


def test_an_unfinished_or_failed_job_has_no_digests(engine):
    job = _job(engine, [b"data"], Window(60.0))
    assert job.digests() == []
    job.cancel()
    assert job.wait(60)
    assert job.fault.kind == "cancelled"
    assert job.digests() == []


def test_chunks_must_be_aligned_and_apart(engine):
    stream = SaveFile("only a name", 8192, Transfer())
    for offsets, sizes in (([8], [8]), ([0, 4096], [4097, 1]), ([0], [])):
        with pytest.raises(ValueError, match=r"aligned|as many"):
            engine.digest(stream, offsets, sizes, 1, Window(0.0), None)
