"""What is damaged, and which tensors that concerns."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

__all__ = ["Contents", "Damage", "some_of"]


@dataclass(frozen=True)
class Damage:
    """One place of a checkpoint that is not as it was written."""

    file: str
    """Path of the file, relative to the checkpoint: a data file, or ``.metadata``."""
    offset: int | None
    """Where in the file it begins, in bytes; None if it is nowhere in particular."""
    nbytes: int | None
    """How far it reaches; None as for ``offset``, or if that cannot be known."""
    problem: str
    tensors: tuple[str, ...]
    """Names (FQNs) of the tensors and objects that cannot be loaded, or not be trusted, because of it."""

    def __str__(self) -> str:
        """One line: the file, the place in it, the problem and the names that it concerns."""
        where = self.file
        if self.offset is not None:
            where += f" at byte {self.offset}"
            if self.nbytes is not None:
                where += f" ({self.nbytes} bytes)"
        line = f"{where}: {self.problem}"
        return f"{line}; concerns {some_of(self.tensors)}" if self.tensors else line


class Contents:
    """Which saved names have bytes where in the data files, from a checkpoint's storage data."""

    def __init__(self, storage_data: Mapping[MetadataIndex, object]) -> None:
        self._entries: dict[str, list[tuple[MetadataIndex, _StorageInfo]]] = {}
        self._spans: dict[str, _Spans] = {}
        for index, info in storage_data.items():
            if isinstance(info, _StorageInfo):
                self._entries.setdefault(info.relative_path, []).append((index, info))

    def entries(self, relative_path: str) -> Sequence[tuple[MetadataIndex, _StorageInfo]]:
        """What the file holds, in no particular order."""
        return self._entries.get(relative_path, ())

    def all_names(self, relative_path: str) -> tuple[str, ...]:
        """The names of all that the file holds, empty tensors too."""
        return tuple(dict.fromkeys(index.fqn for index, _ in self.entries(relative_path)))

    def names(self, relative_path: str, start: int, end: int) -> tuple[str, ...]:
        """The names with bytes in ``[start, end)`` of the file, in the order of their bytes."""
        spans = self._spans.get(relative_path)
        if spans is None:
            spans = self._spans[relative_path] = _Spans(self.entries(relative_path))
        return spans.names(start, end)


class _Spans:
    """The non-empty entries of one file, for binary search; entries may overlap."""

    def __init__(self, entries: Sequence[tuple[MetadataIndex, _StorageInfo]]) -> None:
        self._spans = sorted(
            (info.offset, info.offset + info.length, index.fqn)
            for index, info in entries
            if info.length > 0
        )
        self._furthest = list(accumulate((end for _, end, _ in self._spans), max))

    def names(self, start: int, end: int) -> tuple[str, ...]:
        names: dict[str, None] = {}
        for position in range(bisect.bisect_right(self._furthest, start), len(self._spans)):
            begin, stop, name = self._spans[position]
            if begin >= end:
                break
            if stop > start:
                names[name] = None
        return tuple(names)


def some_of(names: Sequence[str], limit: int = 3) -> str:
    """``'a', 'b', 'c' and 7 more``."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{', '.join(map(repr, names[:limit]))}{more}"
