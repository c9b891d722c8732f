"""Fits a state to a checkpoint, on each rank, before any rank reads a byte. If the state does not fit, nothing of it
has changed, and one error names all that does not fit.
"""

from __future__ import annotations

import difflib
import io
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain, compress
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.format.contents import some_of
from dcp_datastates.format.key_paths import KeyPath, key_of, name_of, nested, put
from dcp_datastates.format.stored_names import is_under, prefixes_of, renamed_path
from dcp_datastates.io.reads import Reads
from dcp_datastates.io.tensor_memory import PLAIN_TYPES, flattened, is_elsewhere, local_tensor
from dcp_datastates.io.unpickling import unpickled
from dcp_datastates.loading.fit import Fit
from dcp_datastates.loading.stored import Stored, shards_of
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.process.job_log import once_per_job

logger = logging.getLogger(__name__)

_OPTIMIZER: Final = re.compile(r"\.state\.|\.param_groups\.")
_TORCHS_GROUPS: Final = ".param_groups."
"""In the names of an optimizer's settings, if torch's ``state_dict()`` was saved: the manager has other names."""

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
    needed: Mapping[str, str] = field(default_factory=dict)
    """Stored names that some rank must take, unless the user has left them out, each with the name of the optimizer
    that it belongs to.
    """
    packed: Collection[str] = ()
    """Names of the program whose values are stored twice pickled: the bytes of what ``torch.save`` wrote."""

    def __post_init__(self) -> None:
        stored = self.stored
        chosen = self.fit.names([*stored, *stored.wrappers, *stored.empty])
        self._empty = {name: old for name, old in chosen.items() if old in stored.empty}
        """The empty dicts that the user chose, as :attr:`names`."""
        self.names = chosen
        """The stored names that the user chose, by the program's."""
        for name in self._empty:
            del chosen[name]
        self._source = stored.places[0]
        self._replaced = frozenset(self.replaced)
        self._filled = self._replaced.union(self.filled)
        self._state: dict[str, Any] = {}
        """The state, nested."""
        self._values: dict[str, Any] = {}
        """The values of the state, by the program's names; also those that it did not have."""
        self._puts: dict[str, KeyPath] = {}
        """Where objects, empty dicts, and what the state did not have go in it, by the program's names."""
        self._before: dict[str, torch.Tensor] = {}
        """The tensors of the state in whose place others are read, as their memory is others', too."""
        self.objects: dict[str, Any] = {}
        """The values of objects that were read, by their stored names."""

    @collection_paused()
    def reads(self, state: dict[str, Any]) -> tuple[Reads, Reads]:
        """What this rank reads, to load into ``state``: nested dicts and lists, with tensors and values. The objects,
        and the tensors; what is to be read into :attr:`wrapped` is not among them.

        Raises :class:`IncompatibleStateError` for all that does not fit, or if two values have one name, or a container
        contains itself.
        """
        stored, fit, names = self.stored, self.fit, self.names
        self._state = state
        self._values, paths = flattened(state)
        unfit = self._make_room(paths) if self._filled else {}
        wanted = self._values
        if not fit.takes_all:
            wanted = {name: value for name, value in wanted.items() if fit.takes(name)}
        olds = list(map(names.get, wanted))
        kinds = stored.kinds(olds)
        are_objects, are_tensors = ((kinds == kind).tolist() for kind in (0, 1))
        objects = list(compress(wanted, are_objects))
        tensors, tensor_olds, targets = (
            list(compress(each, are_tensors)) for each in (wanted, olds, wanted.values())
        )
        for row in self._overlapping(tensors, targets) if self._filled else ():
            name = tensors[row]
            self._before[name] = targets[row]
            self._values[name] = targets[row] = torch.empty_like(targets[row])
            self._puts[name] = paths[name]
        shapes = stored.shapes_if_same(tensor_olds, targets)
        for row, reason in self._unfit(tensor_olds, targets) if shapes is None else ():
            name, target = tensors[row], targets[row]
            is_shard = isinstance(target, torch.Tensor) and type(target) not in PLAIN_TYPES
            if is_shard or not is_under(name, self._replaced):
                unfit[name] = reason
                continue
            self._values[name] = targets[row] = stored.new(names[name])
            self._puts[name] = paths[name]
        self._check([name for name, old in zip(wanted, olds, strict=True) if old is None], unfit)
        into = stored.into(tensor_olds, shards_of(tensors, targets, shapes), fit.cast)
        self._puts = {name: paths[name] for name in objects if name in paths} | self._puts
        return stored.objects([names[name] for name in objects]), into

    def unpickle(self, reads: Reads) -> None:
        """Make the values of the objects that were read. The state has them with :meth:`deliver`.

        Raises as :func:`~dcp_datastates.io.unpickling.unpickled`.
        """
        packed = {self.names.get(name) for name in self.packed}
        for row in reads.objects:
            old, allowed = reads.names[row], self.fit.allow_objects
            said = f"{self._source}: object {old!r}"
            value = unpickled(io.BytesIO(reads.data(row)), said, allowed)
            if old in packed:
                value = unpickled(io.BytesIO(value), said, allowed, device="cpu")
            self.objects[old] = value

    def deliver(self) -> None:
        """All was read: put objects, and what the state did not have, into it."""
        for name, path in self._puts.items():
            old, before = self.names.get(name), self._before.get(name)
            value = self.objects[old] if old in self.objects else self._values.get(name)
            # What had one memory, and was saved with one value, has one memory still.
            if before is None or not torch.equal(_bytes(before), _bytes(value)):
                put(self._state, path, value)

    def nested(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """``values`` of all :attr:`names`, nested as they were saved."""
        names = {**self.names, **self._empty}
        return nested(values, {name: self._path(name, old) for name, old in names.items()})

    @property
    def wrapped(self) -> dict[str, tuple[str, Any]]:
        """The wrapper subclasses of which this rank holds something, by their names in the state: the name of each in
        the checkpoint, and itself.
        """
        found = {name: (self.names[name], self._values[name]) for name in sorted(self._opened())}
        return {name: each for name, each in found.items() if not is_elsewhere(each[1])}

    @property
    def held(self) -> list[str]:
        """The stored names of what is in the state."""
        found = map(self.names.get, self._values)
        return [old for old in found if old is not None]

    def tell_unread(self, unread: Sequence[str], alone: bool) -> None:
        """Tell of those of the stored names that no rank reads, and that were not left out on purpose, in a line of the
        log: that of one rank, if each loads ``alone``, as they most likely load the same names.

        Raises :class:`IncompatibleStateError` if one of them is needed, or there may be none. Says nothing if the user
        wants that.
        """
        answer, stored = self.fit.unexpected, self.stored
        if answer == "ignore" or not unread:
            return
        chosen = frozenset(self.names.values())
        names = [name for name in unread if name in chosen]
        if lost := [name for name in names if name in self.needed]:
            owners = {self.needed[name] for name in lost}
            kept = {owner for name, owner in self.needed.items() if name not in lost}
            out = ", ".join(map(repr, sorted(owners))) if owners.isdisjoint(kept) else "…"
            raise IncompatibleStateError(
                f"{self._source}: nothing in the program takes {len(lost)} values of "
                f"{'the optimizer' if len(owners) == 1 else 'the optimizers'} {some_of(sorted(owners))}: "
                f"{some_of(lost)}. Ways out: rename={{old: new}}, exclude=[{out}]. Nothing was changed.",
                unexpected=lost,
            )
        if not names:
            return
        said = (
            f"{self._source}: {len(names)} of the {len(stored)} stored tensors and objects stay unread, as the state "
            f"to load into does not have them: {some_of(names)}. "
        )
        of_torch = any(_TORCHS_GROUPS in name for name in stored)
        if of_torch and any(_OPTIMIZER.search(name) for name in names):
            said += (
                "The state_dict() of an optimizer is empty before its first step: get_optimizer_state_dict of "
                "torch.distributed.checkpoint.state_dict fills it. "
            )
        said += 'If that is meant, say so: exclude=…, only=…, or unexpected="ignore"'
        if answer == "error":
            raise IncompatibleStateError(said, unexpected=names)
        logger.log(once_per_job(logging.WARNING) if alone else logging.WARNING, "%s", said)

    def _make_room(self, paths: Mapping[str, KeyPath]) -> dict[str, str]:
        """Where the state takes all that is stored: remove what is in the way, and make places for what it does not
        have. Returns what cannot have a place, and why.
        """
        within = self._within()
        self._prune(paths, within)
        unasked = [name for name in self._unasked() if name in within]
        unfit = self._in_the_way(unasked)
        self._values |= {name: self.stored.new(self.names[name]) for name in unasked}
        self._puts = {name: within[name] for name in [*self._empty, *unasked] if name in within}
        return unfit

    def _within(self) -> dict[str, KeyPath]:
        """The stored values that belong to a filled part, with the path of each in the state, which begins with the
        name of the part. A name may begin with that of a part, and belong to another one that the program no longer
        has: the path of ``d.m.weight`` begins with ``d`` if it lay in the dict ``d``, and with ``d.m`` if that was a
        model in ``d``.
        """
        found, split = dict[str, KeyPath](), dict[str, KeyPath]()
        for name, old in chain(self.names.items(), self._empty.items()):
            for part in filter(self._filled.__contains__, prefixes_of(name)):
                path = self._path(name, old)
                first = name_of(path[:1])
                if first == part:
                    found[name] = path
                elif count := _count_of(path, part):
                    # One dict was saved, of which the program has made several parts.
                    split[name] = (part, *path[count:])
                elif first.startswith(f"{part}.") and (name != old or len(path) == 1):
                    # A leaf that was renamed into this part, or a flat state: no path is known.
                    found[name] = (part, first.removeprefix(f"{part}."), *path[1:])
        own = {path[0] for path in found.values()}
        return {name: path for name, path in split.items() if path[0] not in own} | found

    def _path(self, name: str, old: str) -> KeyPath:
        """Where the value called ``name``, which is stored as ``old``, was."""
        return renamed_path(self.stored.path_of(old), old, name)

    def _prune(self, paths: Mapping[str, KeyPath], names: Iterable[str]) -> None:
        """Remove what is not among the stored ``names`` from what is to become exactly what is stored; and a None, or
        an empty list, where more is stored.
        """
        known = frozenset(chain.from_iterable(map(prefixes_of, names)))
        replaced = self._replaced & known
        for name in reversed(list(self._values)):  # of a list, its last elements first
            if name in self.names or not self.fit.takes(name):
                continue
            if is_under(name, replaced):
                _remove(self._state, paths[name])
                del self._values[name]
            elif name in known and is_under(name, self._filled) and _is_empty(self._values[name]):
                del self._values[name]  # a dict or list comes to be there

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

    def _overlapping(self, names: list[str], tensors: list[Any]) -> list[int]:
        """The rows of those that have bytes in common with others of the state, and may have been saved with other
        values: in an object, all; in a dict, those that are a tensor outside of dicts and objects. (Pieces of one
        buffer have no byte in common, and are filled in place.)
        """
        filled, replaced = (
            tuple(f"{part}." for part in parts) for parts in (self._filled, self._replaced)
        )
        within = [row for row, name in enumerate(names) if name.startswith(filled)]
        if not within:
            return []
        spans = {
            name: _span(value)
            for name, value in self._values.items()
            if type(value) in (*PLAIN_TYPES, DTensor)
        }
        common = _common(spans)
        outside = {spans[name] for name in common if not name.startswith(filled)}
        return [
            row
            for row in within
            if (name := names[row]) in common
            and (name.startswith(replaced) or spans[name] in outside)
        ]

    def _opened(self) -> frozenset[str]:
        """The names of wrapper subclasses in the state, of which the checkpoint has the parts."""
        wrappers = self.stored.wrappers
        found = (name for name, old in self.names.items() if old in wrappers) if wrappers else ()
        return frozenset(self._values).intersection(found)

    def _unasked(self) -> list[str]:
        """The names to load that the state does not have, neither itself nor in a wrapper."""
        opened, known = self._opened(), self.stored
        return [
            name
            for name, old in self.names.items()
            if name not in self._values and old in known and not is_under(name, opened)
        ]

    def _unfit(self, olds: Sequence[str], targets: Sequence[Any]) -> Iterator[tuple[int, str]]:
        """Which targets cannot receive the tensors that are stored as ``olds``, and why, in words."""
        for row, (old, value) in enumerate(zip(olds, targets, strict=True)):
            entry, size = self.stored[old], getattr(value, "size", None)
            assert entry is not None  # all are tensors
            if not callable(size):
                kind = type(value).__name__
                yield row, f"saved as a tensor of {tuple(entry.size)}, here a {kind}"
            elif size() != entry.size:
                yield row, f"saved with {tuple(entry.size)}, here {tuple(size())}"
            elif value.dtype != entry.dtype and not self.fit.cast:
                yield row, f"saved as {entry.dtype}, here {value.dtype}"

    def _check(self, missing: list[str], unfit: dict[str, str]) -> None:
        """Raise if there is something that is ``missing`` in the checkpoint and may not be, or ``unfit``."""
        if self.fit.missing != "error":
            if missing and not unfit and self.fit.missing == "warn":
                logger.warning(
                    "%s: %d values of the state are not in the checkpoint, and stay as the program made them: %s",
                    *(self._source, len(missing), ", ".join(map(repr, missing))),
                )
            missing = []
        if not (missing or unfit):
            return
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


def _bytes(tensor: Any) -> torch.Tensor:
    return local_tensor(tensor).detach().reshape(-1).view(torch.uint8)


def _guess(name: str, unexpected: list[str]) -> str:
    """What ``name`` may have been called."""
    last = name.rpartition(".")[2]
    like = [each for each in unexpected if each.rpartition(".")[2] == last] or unexpected
    near = difflib.get_close_matches(name, like[:_GUESSES], 1)
    return f" (was it {near[0]!r}?)" if near else ""


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the tensor's first byte, and that after its last one."""
    memory = local_tensor(tensor)
    is_strided = type(memory) in PLAIN_TYPES and memory.layout is torch.strided
    if not is_strided or memory.is_meta or not memory.numel():
        return 0, 0
    steps = sum((n - 1) * step for n, step in zip(memory.shape, memory.stride(), strict=True))
    return memory.data_ptr(), memory.data_ptr() + (1 + steps) * memory.element_size()


def _common(spans: Mapping[str, tuple[int, int]]) -> set[str]:
    """The names of those that have a byte in common with another one."""
    found: set[str] = set()
    widest, ends_at = "", 0
    for name, (begin, end) in sorted(spans.items(), key=lambda each: each[1]):
        if begin < min(end, ends_at):
            found |= {widest, name}
        if end > ends_at:
            widest, ends_at = name, end
    return found


def _is_empty(value: object) -> bool:
    return value is None or (type(value) is list and not value)


def _count_of(path: KeyPath, part: str) -> int:
    """How many keys at the beginning of ``path`` are the name of ``part``; 0: its name is not among those."""
    return next((n for n in range(1, len(path) + 1) if name_of(path[:n]) == part), 0)


def _remove(root: dict[str, Any], path: KeyPath) -> None:
    """Remove what is at ``path``, and the containers within the part that are empty then. In a list, what is not its
    last element becomes None.
    """
    held: list[Any] = [root]
    for part in path[:-1]:
        held.append(held[-1][key_of(part)])
    for container, key in reversed(list(zip(held, map(key_of, path), strict=True))[1:]):
        if isinstance(container, list) and key != len(container) - 1:
            container[int(key)] = None
        else:
            del container[key]
        if container:
            return
