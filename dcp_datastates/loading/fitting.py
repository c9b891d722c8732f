"""Fits a state to a checkpoint, on each rank, before any rank reads a byte. If the state does not fit, nothing of it
has changed, and one error names all that does not fit.
"""

from __future__ import annotations

import difflib
import io
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain, compress
from typing import Any, Final

import torch

from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.format.contents import some_of
from dcp_datastates.format.key_paths import KeyPath, key_of, put
from dcp_datastates.format.stored_names import is_under, prefixes_of, renamed_path
from dcp_datastates.io.flattening import flattened
from dcp_datastates.io.reads import Reads
from dcp_datastates.io.tensor_memory import PLAIN_TYPES
from dcp_datastates.io.unpickling import unpickled
from dcp_datastates.loading.fit import Fit
from dcp_datastates.loading.stored import Stored, is_elsewhere, shards_of
from dcp_datastates.process.garbage import collection_paused

logger = logging.getLogger(__name__)

LayOut = Callable[[Mapping[str, str], Stored], object]

_GUESSES: Final = 1000
"""How many unexpected names are compared with a missing one, to guess what it was called."""


@dataclass(eq=False)
class Fitting:
    """Fits one state to one checkpoint."""

    fit: Fit
    """What the user chose."""
    stored: Stored
    """The checkpoint."""
    _: KW_ONLY
    filled: Iterable[str] = ()
    """Names of dicts in the state, which receive all that is stored below these names."""
    replaced: Iterable[str] = ()
    """Names of dicts in the state, which become exactly what is stored below these names. Neither they nor the
    containers in them may be the program's own.
    """
    lay_out: Sequence[LayOut] = ()
    """Called before the state is looked at, with the stored names to load by the program's, and with what is stored:
    they put places for it into dicts of the state.
    """
    needed: Mapping[str, str] = field(default_factory=dict)
    """Stored names that some rank must take, unless the user has left them out, each with the name of the optimizer
    that it belongs to.
    """
    packed: Collection[str] = ()
    """Names of the program whose values are stored twice pickled: the bytes of what ``torch.save`` wrote."""

    def __post_init__(self) -> None:
        self._source = self.stored.places[0]
        self._replaced = frozenset(self.replaced)
        self._filled = self._replaced.union(self.filled)
        self._state: dict[str, Any] = {}
        """The state, nested."""
        self._values: dict[str, Any] = {}
        """The values of the state, by the program's names; also those that it did not have."""
        self._paths: Mapping[str, KeyPath] = {}
        """Where the values of the state are."""
        self._names: dict[str, str] = {}
        """The stored names to load, by the program's."""
        self._asked: Sequence[str] = ()
        """The program's names of what is read."""
        self._objects: dict[str, Any] = {}
        """The values of objects that were read, by the program's names."""
        self._wrapped: frozenset[str] = frozenset()
        """The program's names of wrapper subclasses, of which the checkpoint has the parts."""
        self._grown: dict[str, KeyPath] = {}
        """The values that the state did not have, and where they come to be."""
        self._empty: dict[str, KeyPath] = {}
        """The empty dicts to load, and where they come to be."""

    @property
    def names(self) -> dict[str, str]:
        """The stored names that the user chose, by the program's."""
        stored = self.stored
        return self.fit.names([*stored, *stored.wrappers, *stored.empty])

    @collection_paused()
    def reads(self, state: dict[str, Any]) -> tuple[Reads, Reads]:
        """What this rank reads, to load into ``state``: nested dicts and lists, with tensors and values. The objects,
        and the tensors; what is to be read into :attr:`wrapped` is not among them.

        Raises :class:`IncompatibleStateError` for all that does not fit, or if two values have one name, or a container
        contains itself.
        """
        stored = self.stored
        for lay_out in self.lay_out:
            lay_out(self.fit.names([*stored, *stored.wrappers]), stored)
        self._state = state
        self._values, self._paths = flattened(state)
        names, olds, values = self._matched(self.names)
        self._asked = names
        are_tensors = stored.are_tensors(olds)
        tensors = [*compress(names, are_tensors)]
        shards = shards_of(tensors, compress(values, are_tensors))
        into = stored.into([*compress(olds, are_tensors)], shards, self.fit.cast, tensors)
        are_objects = [not is_tensor for is_tensor in are_tensors]
        objects = [*compress(olds, are_objects)], [*compress(names, are_objects)]
        return stored.objects(*objects), into

    def _matched(self, names: dict[str, str]) -> tuple[list[str], list[str], list[Any]]:
        """The values of the state that are to be read, in columns: their names in the state and in the checkpoint, and
        themselves. Raises if they cannot be.
        """
        self._names = names
        if empty := frozenset(self.stored.empty):
            found = [name for name, old in names.items() if old in empty]
            self._empty = {name: self._path(name, names.pop(name)) for name in found}
        if wrappers := self.stored.wrappers:
            self._wrapped = frozenset(name for name, old in names.items() if old in wrappers)
        unfit: dict[str, str] = {}
        if self._filled:
            self._prune()
            unfit = self._grow()
        wanted = self._values
        if not self.fit.takes_all:
            wanted = {name: value for name, value in wanted.items() if self.fit.takes(name)}
        olds = list(map(names.get, wanted))
        missing = [name for name, old in zip(wanted, olds, strict=True) if old is None]
        unfit |= self._unfit(wanted, olds)
        if unfit or (missing and self.fit.missing == "error"):
            self._refuse(missing if self.fit.missing == "error" else [], unfit)
        if missing and self.fit.missing == "warn":
            logger.warning(
                "%s: %d values of the state are not in the checkpoint, and stay as the program made them: %s",
                self._source,
                len(missing),
                ", ".join(map(repr, missing)),
            )
        are_read = [old is not None and old not in wrappers for old in olds]
        return (
            list(compress(wanted, are_read)),
            [old for old in olds if old is not None and old not in wrappers],
            list(compress(wanted.values(), are_read)),
        )

    def begin(self) -> None:
        """All ranks' states fit. Put what is empty, which nothing is read for, into the state where it takes all: the
        dicts that were saved, and tensors without elements.
        """
        for name, path in self._empty.items():
            if is_under(name, self._filled):
                put(self._state, path, None)
        for name, path in self._grown.items():
            value = self._values[name]
            if isinstance(value, torch.Tensor) and not value.numel():
                put(self._state, path, value)

    def unpickle(self, reads: Reads) -> None:
        """Make the values of the objects that were read. The state has them with :meth:`deliver`.

        Raises as :func:`~dcp_datastates.io.unpickling.unpickled`.
        """
        for row in reads.objects:
            said, allowed = f"{self._source}: object {reads.names[row]!r}", self.fit.allow_objects
            value = unpickled(io.BytesIO(reads.data(row)), said, allowed)
            if reads.keys[row] in self.packed:
                value = unpickled(io.BytesIO(value), said, allowed, device="cpu")
            self._objects[reads.keys[row]] = value

    def deliver(self) -> None:
        """All was read: put objects, and tensors that the state did not have, into it, in the order of the names."""
        for name in self._asked if self._grown else self._objects:
            path = self._grown.get(name)
            if name in self._objects:
                put(self._state, path or self._paths.get(name, (name,)), self._objects[name])
            elif path is not None:
                put(self._state, path, self._values[name])

    @property
    def wrapped(self) -> dict[str, tuple[str, Any]]:
        """The wrapper subclasses of which this rank holds something, by their names in the state: the name of each in
        the checkpoint, and itself.
        """
        found = sorted(self._wrapped.intersection(self._values))
        here = [name for name in found if not is_elsewhere(self._values[name])]
        return {name: (self._names[name], self._values[name]) for name in here}

    @property
    def held(self) -> list[str]:
        """The stored names of what is in the state."""
        found = map(self._names.get, self._values)
        return [old for old in found if old is not None]

    def unasked(self, unread: Iterable[str]) -> list[str]:
        """Those of the stored names that no rank reads which are not left out on purpose.

        Raises :class:`IncompatibleStateError` if one of them is needed.
        """
        chosen = frozenset(self._names.values())
        left = [name for name in unread if name in chosen]
        if lost := [name for name in left if name in self.needed]:
            owners = {self.needed[name] for name in lost}
            kept = {owner for name, owner in self.needed.items() if name not in lost}
            out = ", ".join(map(repr, sorted(owners))) if owners.isdisjoint(kept) else "…"
            raise IncompatibleStateError(
                f"{self._source}: nothing in the program takes {len(lost)} values of "
                f"{'the optimizer' if len(owners) == 1 else 'the optimizers'} {some_of(sorted(owners))}: "
                f"{some_of(lost)}. Ways out: rename={{old: new}}, exclude=[{out}]. Nothing was changed.",
                unexpected=lost,
            )
        return left

    def _prune(self) -> None:
        """Remove what is not stored from what is to become exactly what is stored; and a None, or an empty list,
        where more is stored.
        """
        known = frozenset(chain.from_iterable(map(prefixes_of, (*self._names, *self._empty))))
        replaced = self._replaced & known
        for name in reversed(list(self._values)):  # of a list, its last elements first
            if name in self._names or not self.fit.takes(name):
                continue
            if is_under(name, replaced):
                _remove(self._state, self._paths[name])
                del self._values[name]
            elif name in known and is_under(name, self._filled) and _is_empty(self._values[name]):
                del self._values[name]  # a dict or list comes to be there

    def _grow(self) -> dict[str, str]:
        """Make room for what is stored below names that take all of it. Returns where that cannot be, and why."""
        replaced = {name: self._values[name] for name in self._names if self._may_replace(name)}
        outgrown = [name for name, _ in self._unfit(replaced, [*map(self._names.get, replaced)])]
        new = [name for name in self._unasked() if is_under(name, self._filled)]
        unfit = self._in_the_way(new)
        for name in [*new, *outgrown]:
            old = self._names[name]
            self._values[name] = self.stored.new(old)
            self._grown[name] = self._path(name, old)
        return unfit

    def _path(self, name: str, old: str) -> KeyPath:
        """Where the value called ``name``, which is stored as ``old``, comes to be."""
        return renamed_path(self.stored.path_of(old), old, name)

    def _in_the_way(self, new: list[str]) -> dict[str, str]:
        """The names of values of the state where a dict was saved, or the reverse; and that, in words."""
        held = frozenset(chain.from_iterable(map(prefixes_of, self._values))) if new else ()
        found = {name: "saved as a value, here a dict" for name in new if name in held}
        for name in new:
            for prefix in prefixes_of(name):
                if prefix in self._values:
                    kind = type(self._values[prefix]).__name__
                    found[prefix] = f"saved as a dict or a list, here a {kind}"
        return found

    def _may_replace(self, name: str) -> bool:
        """Whether there is a value, and a new tensor may come to be in its place: it is no shard."""
        if name not in self._values or not is_under(name, self._replaced):
            return False
        value = self._values[name]
        return not isinstance(value, torch.Tensor) or type(value) in PLAIN_TYPES

    def _unasked(self) -> list[str]:
        """The names to load that the state does not have, neither itself nor in a wrapper."""
        opened = self._wrapped.intersection(self._values)
        return [
            name
            for name in self._names
            if not (name in self._values or name in self._wrapped or is_under(name, opened))
        ]

    def _unfit(self, wanted: Mapping[str, Any], olds: Sequence[Any]) -> Iterator[tuple[str, str]]:
        """The names of values that cannot receive what is stored as ``olds``, and why, in words. None is not stored."""
        tensors = self.stored.are_tensors(olds)
        if self.stored.has_same([*compress(olds, tensors)], [*compress(wanted.values(), tensors)]):
            return
        for (name, value), old in zip(wanted.items(), olds, strict=True):
            entry = None if old is None else self.stored.get(old)
            if entry is None:
                continue
            size = getattr(value, "size", None)
            if not callable(size):
                yield (
                    name,
                    f"saved as a tensor of {tuple(entry.size)}, here a {type(value).__name__}",
                )
            elif size() != entry.size:
                yield name, f"saved with {tuple(entry.size)}, here {tuple(size())}"
            elif value.dtype != entry.dtype and not self.fit.cast:
                yield name, f"saved as {entry.dtype}, here {value.dtype}"

    def _refuse(self, missing: list[str], unfit: dict[str, str]) -> None:
        unexpected = self._unasked()
        lines = [f"{self._source}: the state does not fit the checkpoint"]
        if missing:
            lines.append(f"  {len(missing)} in the state and not in the checkpoint:")
            lines += [f"    {name!r}{_guess(name, unexpected)}" for name in missing]
        if unfit:
            lines.append(f"  {len(unfit)} of another shape or type:")
            lines += [f"    {name!r}: {reason}" for name, reason in unfit.items()]
        if unexpected:
            lines.append(f"  {len(unexpected)} in the checkpoint and not in this rank's state:")
            lines += [f"    {name!r}" for name in unexpected]
        ways = ["rename={old: new}"] if missing and unexpected else []
        ways += ['missing="warn" keeps what the program made'] if missing else []
        ways += ["exclude=[…] leaves values out"]
        if any(" as torch." in reason for reason in unfit.values()):
            ways.append("cast=True converts dtypes")
        lines.append(f"  Ways out: {'; '.join(ways)}. Nothing was changed.")
        raise IncompatibleStateError(
            "\n".join(lines), missing=missing, unexpected=unexpected, unfit=unfit
        )


def _guess(name: str, unexpected: list[str]) -> str:
    """What ``name`` may have been called."""
    last = name.rpartition(".")[2]
    like = [each for each in unexpected if each.rpartition(".")[2] == last] or unexpected
    near = difflib.get_close_matches(name, like[:_GUESSES], 1)
    return f" (was it {near[0]!r}?)" if near else ""


def _is_empty(value: object) -> bool:
    return value is None or (type(value) is list and not value)


def _remove(root: dict[str, Any], path: KeyPath) -> None:
    """Remove what is at ``path``; of a list, only its last element."""
    container: Any = root
    *before, last = map(key_of, path)
    for key in before:
        container = container[key]
    if isinstance(container, list) and last != len(container) - 1:
        container[int(last)] = None
    else:
        del container[last]
