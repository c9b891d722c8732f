"""What a crash may leave on disk: a model of a POSIX file system with a volatile and a durable side.

Fed with the tree that was there (all of it durable) and a trace of what was done to it, the model
enumerates what may be found after a crash at any instant. It promises what POSIX promises, and no more:

- A change of a file's data is durable once a sync of that file, begun after the change, has ended. Until
  then each write is there, or not, or one half of it, or only the growth of the file (zeros); each
  change of size is there or not; all independently of each other.
- A change of a directory (a name that comes, goes, or is bound to another file) is durable once a sync
  of *that directory*, begun after the change, has ended. Until then it is there or not, independently
  of all others. A sync of a file says nothing of its name.
- What a file system cannot break: a rename within a directory changes both names or none, and the new
  name leads to the same file, whose data are durable or not on their own; below a directory that is not
  there, there is nothing.

Real file systems lose less than that, each in its own way.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import random
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from support.crashes.traces import Record, RecordError

Tree: TypeAlias = Mapping[str, "bytes | None"]
"""Paths and what is there: the bytes of a file, None for a directory. The root is not in it."""

EXHAUSTIVE = 4096
"""Up to so many combinations at a crash point all are enumerated; beyond, a sample."""

SAMPLES = 256
"""Random combinations at a crash point that has too many, besides the systematic ones."""

# How much of a write has persisted. Of other changes: nothing or all.
ABSENT, GROWN, FIRST_HALF, LAST_HALF, WHOLE = range(5)


@dataclass(frozen=True)
class CrashState:
    """What a crash after ``point`` records may leave, and which attempts were told of before."""

    point: int
    told: tuple[str, ...]
    tree: Tree

    @property
    def key(self) -> bytes:
        """Equal for states with equal trees."""
        digest = hashlib.blake2b(digest_size=16)
        for path, content in sorted(self.tree.items()):
            digest.update(f"{path}\0".encode() + _digest(content))
        return digest.digest()


@functools.lru_cache(4096)
def _digest(content: bytes | None) -> bytes:
    return b"directory" if content is None else hashlib.blake2b(content, digest_size=16).digest()


@dataclass(frozen=True)
class _Binding:
    """A change of a directory: names, and the inode that each leads to from now on (None: none)."""

    index: int
    names: tuple[tuple[str, int | None], ...]

    options = (ABSENT, WHOLE)


@dataclass(frozen=True)
class _Write:
    index: int
    offset: int
    data: bytes

    options = (ABSENT, GROWN, FIRST_HALF, LAST_HALF, WHOLE)

    def apply(self, content: bytes, option: int) -> bytes:
        if option == ABSENT:
            return content
        content = content.ljust(self.offset + len(self.data), b"\0")
        if option == GROWN:
            return content
        half = len(self.data) // 2
        first = 0 if option != LAST_HALF else half
        last = len(self.data) if option != FIRST_HALF else half
        return (
            content[: self.offset + first] + self.data[first:last] + content[self.offset + last :]
        )


@dataclass(frozen=True)
class _Resize:
    index: int
    size: int
    shrinks: bool

    options = (ABSENT, WHOLE)

    def apply(self, content: bytes, option: int) -> bytes:
        if option == ABSENT:
            return content
        grown = content.ljust(self.size, b"\0")
        return grown[: self.size] if self.shrinks else grown


@dataclass
class _File:
    durable: bytes = b""
    pending: list[_Write | _Resize] = field(default_factory=list)

    def persist(self, before: int) -> None:
        for change in self.pending:
            if change.index < before:
                self.durable = change.apply(self.durable, WHOLE)
        self.pending = [change for change in self.pending if change.index >= before]


@dataclass
class _Directory:
    durable: dict[str, int] = field(default_factory=dict)
    current: dict[str, int] = field(default_factory=dict)
    pending: list[_Binding] = field(default_factory=list)

    def bind(self, index: int, *names: tuple[str, int | None]) -> None:
        change = _Binding(index, names)
        _rebind(self.current, change)
        self.pending.append(change)

    def persist(self, before: int) -> None:
        for change in self.pending:
            if change.index < before:
                _rebind(self.durable, change)
        self.pending = [change for change in self.pending if change.index >= before]


def _rebind(names: dict[str, int], change: _Binding) -> None:
    for name, inode in change.names:
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


class _Model:
    """The file system: inodes, each with what is durable and what is pending."""

    def __init__(self, start: Tree) -> None:
        self.inodes: list[_File | _Directory] = [_Directory()]
        self.told: list[str] = []
        self._syncs: dict[str, tuple[int, int]] = {}
        for path, content in sorted(start.items()):
            directory, name = self._place(path)
            inode = self._add(_Directory() if content is None else _File(content))
            directory.durable[name] = directory.current[name] = inode

    # ---- replaying ---------------------------------------------------------------------------

    def replay(self, index: int, record: Record) -> None:
        getattr(self, f"_{record.op}")(index, record)

    def _add(self, inode: _File | _Directory) -> int:
        self.inodes.append(inode)
        return len(self.inodes) - 1

    def _find(self, path: str) -> int:
        number = 0
        for name in PurePosixPath(path).parts:
            inode = self.inodes[number]
            if not isinstance(inode, _Directory) or name not in inode.current:
                raise RecordError(f"the trace has no record of how {path!r} came to be")
            number = inode.current[name]
        return number

    def _place(self, path: str) -> tuple[_Directory, str]:
        pure = PurePosixPath(path)
        directory = self.inodes[self._find(str(pure.parent))]
        if not isinstance(directory, _Directory):
            raise RecordError(f"{str(pure.parent)!r} is no directory in the trace")
        return directory, pure.name

    def _file(self, path: str) -> _File:
        inode = self.inodes[self._find(path)]
        if not isinstance(inode, _File):
            raise RecordError(f"{path!r} is no file in the trace")
        return inode

    def _new_name(self, index: int, record: Record, inode: _File | _Directory) -> None:
        directory, name = self._place(record.path)
        if name in directory.current:
            raise RecordError(f"{record}: it exists already")
        directory.bind(index, (name, self._add(inode)))

    def _mkdir(self, index: int, record: Record) -> None:
        self._new_name(index, record, _Directory())

    def _create(self, index: int, record: Record) -> None:
        self._new_name(index, record, _File())

    def _unlink(self, index: int, record: Record) -> None:
        directory, name = self._place(record.path)
        self._find(record.path)
        directory.bind(index, (name, None))

    _rmdir = _unlink

    def _link(self, index: int, record: Record) -> None:
        inode = self._find(record.path)
        directory, name = self._place(record.to)
        if name in directory.current:
            raise RecordError(f"{record}: it exists already")
        directory.bind(index, (name, inode))

    def _rename(self, index: int, record: Record) -> None:
        inode = self._find(record.path)
        source, old = self._place(record.path)
        target, new = self._place(record.to)
        if source is target:
            source.bind(index, (old, None), (new, inode))
        else:
            source.bind(index, (old, None))
            target.bind(index, (new, inode))

    def _write(self, index: int, record: Record) -> None:
        self._file(record.path).pending.append(_Write(index, record.offset, record.data))

    def _truncate(self, index: int, record: Record) -> None:
        self._file(record.path).pending.append(_Resize(index, record.size, shrinks=True))

    def _allocate(self, index: int, record: Record) -> None:
        self._file(record.path).pending.append(_Resize(index, record.size, shrinks=False))

    def _sync_begin(self, index: int, record: Record) -> None:
        self._syncs[record.id] = self._find(record.path), index

    def _sync(self, index: int, record: Record) -> None:
        if record.id not in self._syncs:
            raise RecordError(f"{record}: it never began")
        inode, begun = self._syncs.pop(record.id)
        self.inodes[inode].persist(begun)

    def _told(self, index: int, record: Record) -> None:
        self.told.append(record.attempt)

    # ---- crashing ----------------------------------------------------------------------------

    def trees(self, seed: int) -> Iterator[Tree]:
        """What a crash at this moment may leave."""
        pending = sorted(
            (change.index, part, number)
            for number, inode in enumerate(self.inodes)
            for part, change in enumerate(inode.pending)
        )
        places = {(number, part): place for place, (_, part, number) in enumerate(pending)}
        options = [self.inodes[number].pending[part].options for _, part, number in pending]
        contents: dict[tuple[int, ...], bytes] = {}
        for choice in _choices(options, seed):
            tree: dict[str, bytes | None] = {}
            self._leave(0, "", choice, places, contents, tree)
            yield tree

    def _leave(
        self,
        number: int,
        prefix: str,
        choice: Sequence[int],
        places: Mapping[tuple[int, int], int],
        contents: dict[tuple[int, ...], bytes],
        tree: dict[str, bytes | None],
    ) -> None:
        directory = self.inodes[number]
        names = dict(directory.durable)
        for part, change in enumerate(directory.pending):
            if choice[places[number, part]]:
                _rebind(names, change)
        for name, inode in names.items():
            if isinstance(self.inodes[inode], _Directory):
                tree[prefix + name] = None
                self._leave(inode, f"{prefix}{name}/", choice, places, contents, tree)
            else:
                tree[prefix + name] = self._content(inode, choice, places, contents)

    def _content(
        self,
        number: int,
        choice: Sequence[int],
        places: Mapping[tuple[int, int], int],
        contents: dict[tuple[int, ...], bytes],
    ) -> bytes:
        file = self.inodes[number]
        chosen = [choice[places[number, part]] for part in range(len(file.pending))]
        key = (number, *chosen)
        if key not in contents:
            content = file.durable
            for change, option in zip(file.pending, chosen, strict=True):
                content = change.apply(content, option)
            contents[key] = content
        return contents[key]


def _choices(options: Sequence[tuple[int, ...]], seed: int) -> Iterable[Sequence[int]]:
    """All combinations if they are few. Else: none, all, all but one, only one, those done first,
    those done last, and random ones.
    """
    if math.prod(map(len, options)) <= EXHAUSTIVE:
        return itertools.product(*options)
    return _sample(options, random.Random(seed))


def _sample(options: Sequence[tuple[int, ...]], chance: random.Random) -> Iterator[Sequence[int]]:
    every, none = [WHOLE] * len(options), [ABSENT] * len(options)
    for place, possible in enumerate(options):
        for option in possible:
            yield [*every[:place], option, *every[place + 1 :]]
            yield [*none[:place], option, *none[place + 1 :]]
        yield [*every[:place], *none[place:]]
        yield [*none[:place], *every[place:]]
    for _ in range(SAMPLES):
        yield [chance.choice(possible) for possible in options]


def crash_states(start: Tree, records: Sequence[Record], seed: int = 0) -> Iterator[CrashState]:
    """All that a crash after any number of ``records`` may leave (see :data:`EXHAUSTIVE`).

    Raises :class:`RecordError` for a trace that cannot have happened: a record is missing.
    """
    model = _Model(start)
    for point in range(len(records) + 1):
        if point:
            model.replay(point, records[point - 1])
            if records[point - 1].op == "sync_begin":
                continue  # changes nothing
        told = tuple(model.told)
        for tree in model.trees(seed + point):
            yield CrashState(point, told, tree)


# --- trees on a real disk -----------------------------------------------------------------------


def read_tree(root: Path) -> dict[str, bytes | None]:
    """What is below ``root`` now."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }


class Disk:
    """A directory that becomes one tree after another; only what differs is written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        self._tree: Tree = {}

    def become(self, tree: Tree) -> None:
        gone = [
            path for path in self._tree if path not in tree or _kinds_differ(self._tree, tree, path)
        ]
        for path in sorted(gone, reverse=True):  # children first
            where = self.root / path
            where.rmdir() if self._tree[path] is None else where.unlink()
        for path, content in sorted(tree.items()):
            was_there = path in self._tree and path not in gone
            if was_there and self._tree[path] == content:
                continue
            if content is None:
                (self.root / path).mkdir()
            else:
                (self.root / path).write_bytes(content)
        self._tree = dict(tree)


def _kinds_differ(one: Tree, other: Tree, path: str) -> bool:
    return (one[path] is None) != (other[path] is None)
