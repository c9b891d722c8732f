"""Where one rank has put its share: what the coordinator must know to write ``.metadata``.

The same from save to save, but for the attempt's directory, which it leaves out; so it travels once.
"""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dcp_datastates.format.chunk_table import Ints

__all__ = ["Report", "Told"]


@dataclass(frozen=True, eq=False)
class Report:
    """In the order of the share's items: which file, where in it, how long (bytes).

    ``files`` are name (below the attempt's directory), size in bytes, and offset of the checksum table.
    """

    files: tuple[tuple[str, int, int], ...]
    numbers: Ints
    offsets: Ints
    lengths: Ints

    def encode(self) -> bytes:
        columns = (self.numbers, self.offsets, self.lengths)
        return pickle.dumps((self.files, *(column.tobytes() for column in columns)))

    @staticmethod
    def decode(data: bytes) -> Report:
        files, *columns = pickle.loads(data)  # from a rank of this job, by DCP's own pickles
        return Report(files, *(np.frombuffer(column, np.int64) for column in columns))

    @cached_property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Told:
    """In place of DCP's write results: a report, by its digest alone if the coordinator has it."""

    digest: bytes
    data: bytes | None
    samples: bytes = b""
    """Of what this rank shares with others; see ``replicas.py``."""

    def __reduce__(self) -> Any:
        return Told, (self.digest, self.data, self.samples)
