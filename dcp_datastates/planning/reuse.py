"""Which chunks a save need not write, because a committed checkpoint has them.

A chunk is found again by its name, its place in the tensor, its dtype and a digest of all its bytes: different bytes
have the same digest with a probability below 2**-96 (``Engine.digest``), so equality is no guess. Only checkpoints of
this process count: another process's digests have another key.

A file of an earlier checkpoint is linked as a whole, also the bytes that are of no use any more. :func:`worth_linking`
bounds these, and the number of files.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

__all__ = [
    "ChunkKey",
    "CommittedChunks",
    "LinkedFile",
    "StoredChunk",
    "StoredFile",
    "worth_linking",
]

_KEPT_SAVES: Final = 4
"""Of how many committed saves the chunks are known: a process may save several states in turn."""

MOST_LINKED_FILES: Final = 16
"""How many files a rank links in one save, at most. Otherwise each save would leave one more."""

ChunkKey = tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype, bytes]
"""A chunk: the FQN, its offsets and sizes in the tensor, in elements, the dtype, and the digest of its bytes."""


@dataclass(frozen=True)
class StoredFile:
    """A data file of a committed checkpoint. Equal: the same bytes, in whichever checkpoint."""

    attempt: str
    """The attempt that wrote it."""
    number: int
    """Its number among the files that this rank wrote then."""
    nbytes: int
    table_offset: int
    path: Path = field(compare=False)


@dataclass(frozen=True)
class StoredChunk:
    """A chunk's place."""

    file: StoredFile
    offset: int
    nbytes: int


@dataclass(frozen=True)
class LinkedFile:
    """A data file that is a hard link to one of an earlier checkpoint."""

    name: str
    nbytes: int
    table_offset: int
    chunks: Mapping[int, StoredChunk]
    """By item of the plan, the chunks that are read from it."""


class CommittedChunks:
    """This rank's chunks of the newest committed saves. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards what follows
        self._saves: deque[Mapping[ChunkKey, StoredChunk]] = deque(maxlen=_KEPT_SAVES)

    def add(self, chunks: Mapping[ChunkKey, StoredChunk]) -> None:
        """Add those of a save that is committed, the newest so far."""
        with self._lock:
            self._saves.appendleft(chunks)

    def clear(self) -> None:
        """Forget all."""
        self._saves.clear()

    def find(self, keys: Mapping[int, ChunkKey]) -> dict[int, StoredChunk]:
        """Those of the chunks ``keys`` that are stored, each in the newest checkpoint that has it."""
        with self._lock:
            saves = list(self._saves)
        found = {}
        for item, key in keys.items():
            stored = next((save[key] for save in saves if key in save), None)
            if stored is not None:
                found[item] = stored
        return found


def worth_linking(found: Mapping[int, StoredChunk]) -> dict[StoredFile, dict[int, StoredChunk]]:
    """The files to link for the chunks ``found``, by item: those of which at least half is used, and of these the
    :data:`MOST_LINKED_FILES` with the most used bytes.

    All other chunks are written again. So a checkpoint takes at most twice its bytes, however many saves were before.
    """
    by_file: dict[StoredFile, dict[int, StoredChunk]] = {}
    for item, chunk in found.items():
        by_file.setdefault(chunk.file, {})[item] = chunk
    used = {file: _nbytes(list(chunks.values())) for file, chunks in by_file.items()}
    worth = [file for file in by_file if 2 * used[file] >= file.nbytes]
    worth.sort(key=lambda file: -used[file])
    return {file: by_file[file] for file in worth[:MOST_LINKED_FILES]}


def _nbytes(chunks: Sequence[StoredChunk]) -> int:
    return sum(chunk.nbytes for chunk in chunks)
