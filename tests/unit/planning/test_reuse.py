"""Which files are worth linking, and which chunks are found again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dcp_datastates.planning.reuse import (
    MOST_LINKED_FILES,
    CommittedChunks,
    StoredChunk,
    StoredFile,
    worth_linking,
)


def _file(attempt: str, nbytes: int = 1000, path: str = "/a") -> StoredFile:
    return StoredFile(attempt, 0, nbytes, nbytes - 8, Path(path))


def _key(name: str, digest: bytes = b"d"):
    return (name, (0,), (8,), torch.float32, digest)


@pytest.mark.parametrize(("used", "linked"), [(499, False), (500, True), (990, True)])
def test_a_file_is_linked_if_half_of_it_is_used(used, linked):
    found = {3: StoredChunk(_file("a"), 0, used - 1), 5: StoredChunk(_file("a"), 600, 1)}
    assert worth_linking(found) == ({_file("a"): found} if linked else {})


def test_the_files_with_the_most_used_bytes_are_linked():
    files = [_file(f"{number}", 1000 + number) for number in range(30)]
    found = {n: StoredChunk(file, 0, 1000 + n) for n, file in enumerate(files)}
    assert list(worth_linking(found)) == files[::-1][:MOST_LINKED_FILES]


def test_one_file_in_two_checkpoints_is_one():
    found = {
        0: StoredChunk(_file("a", path="/1"), 0, 300),
        1: StoredChunk(_file("a", path="/2"), 300, 300),
    }
    ((_, chunks),) = worth_linking(found).items()
    assert chunks == found


def test_a_chunk_is_found_in_the_newest_save_and_forgotten_after_a_few():
    committed = CommittedChunks()
    for number in range(6):
        place = StoredChunk(_file(str(number)), 0, 8)
        committed.add({_key("w", b"old" if number < 2 else b"new"): place})
    assert committed.find({7: _key("w", b"new")})[7].file == _file("5")
    assert committed.find({7: _key("w", b"old"), 8: _key("v", b"new")}) == {}
