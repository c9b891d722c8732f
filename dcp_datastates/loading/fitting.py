"""Plans a load of what the user chose, on each rank, before any rank reads a byte. If the state does not fit, nothing
of it has changed, and one error names all that does not fit.
"""

from __future__ import annotations

import difflib
import io
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final, cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.format.contents import some_of
from dcp_datastates.format.key_paths import KeyPath, key_of, typed_paths
from dcp_datastates.format.name_patterns import renamed_path
from dcp_datastates.format.nesting import empty_in, path_of, put
from dcp_datastates.format.stored_names import is_under, prefixes_of, wrappers
from dcp_datastates.loading.fit import Fit
from dcp_datastates.process.garbage import collection_paused

__all__ = ["FittingPlanner", "LayOut"]

logger = logging.getLogger(__name__)

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_TENSORS: Final = (*_PLAIN, DTensor)

LayOut = Callable[[Mapping[str, str], Mapping[str, STORAGE_TYPES]], object]

_GUESSES: Final = 1000
"""How many unexpected names are compared with a missing one, to guess what it was called."""


class FittingPlanner(DefaultLoadPlanner):
    """Plans a load of what ``fit`` chooses, for :func:`torch.distributed.checkpoint.load`.

    Args:
        fit: what the user chose.
        source: the checkpoint's path, for messages.
        filled: names of dicts in the state, which receive all that is stored below these names.
        replaced: names of dicts in the state, which become exactly what is stored below these names. Neither they nor
            the containers in them may be the program's own.
        lay_out: called before the state is looked at, with the stored names to load by the program's, and with what is
            stored: they put places for it into dicts of the state.
        needed: stored names that some rank must take, unless the user has left them out, each with the name of the
            optimizer that it belongs to.
    """

    def __init__(
        self,
        fit: Fit,
        source: object,
        filled: Iterable[str] = (),
        replaced: Iterable[str] = (),
        lay_out: Sequence[LayOut] = (),
        needed: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.fit = fit
        self._lay_out = lay_out
        self._needed = needed or {}
        self._source = source
        self._replaced = frozenset(replaced)
        self._filled = frozenset(filled) | self._replaced
        self._names: dict[str, str] = {}
        """The stored names to load, by the program's."""
        self._chosen: frozenset[str] = frozenset()
        self._wrapped: frozenset[str] = frozenset()
        """The program's names of wrapper subclasses, of which the checkpoint has the parts."""
        self._grown: dict[str, KeyPath] = {}
        """The values that the state did not have, and where they come to be."""
        self._paths: Mapping[str, KeyPath] = {}
        """Where the values of the state are."""
        self._empty: dict[str, KeyPath] = {}
        """The empty dicts to load, and where they come to be."""
        self._tensors: dict[str, torch.Tensor] = {}
        """The tensors at the top of the state, if DCP does not get them."""

    def keep_tensors(self, state: dict[str, Any]) -> dict[str, Any]:
        """``state`` without its tensors, which this planner adds again: for ``dcp.load``, which asks each value at the
        top whether it is ``Stateful``. That takes 10 us.
        """
        if self._filled:
            return state
        self._tensors = {n: value for n, value in state.items() if type(value) in _TENSORS}
        return {name: value for name, value in state.items() if name not in self._tensors}

    def put_tensors(self, state: dict[str, Any]) -> None:
        """After the load: put what has come to be in the place of a tensor into ``state``. That is an object if one was
        saved, and a new tensor for one on the meta device.
        """
        for name, tensor in self._tensors.items():
            value = self.original_state_dict[name]
            if value is not tensor and name in state:
                state[name] = value

    @collection_paused()
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state, with the tensors that DCP did not get.

        Raises :class:`IncompatibleStateError` if two values have one name, or a container contains itself.
        """
        state_dict.update(self._tensors)
        if self._lay_out and metadata is not None:
            stored = metadata.state_dict_metadata
            names = self.fit.names([*stored, *wrappers(stored)])
            for lay_out in self._lay_out:
                lay_out(names, stored)
        try:
            self.flatten_sharded_tensors = False  # another walk through the state, seldom needed
            super().set_up_planner(state_dict, metadata, is_coordinator)
            if any(isinstance(value, ShardedTensor) for value in self.state_dict.values()):
                self.flatten_sharded_tensors = True
                super().set_up_planner(state_dict, metadata, is_coordinator)
            self._paths = typed_paths(state_dict, self.mappings)
        except ValueError as error:
            raise IncompatibleStateError(
                f"two values of the state have one name: {error}"
            ) from error
        except RecursionError as error:
            raise IncompatibleStateError(
                "the state cannot be loaded into: a dict or list in it contains itself"
            ) from error

    @collection_paused()
    def create_local_plan(self) -> LoadPlan:
        """Match the names; raise :class:`IncompatibleStateError` for all that does not fit."""
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        boxed = wrappers(stored)
        empty = frozenset(empty_in(self.metadata))
        names = self.fit.names([*stored, *boxed, *empty])
        self._empty = {name: self._path(name, old) for name, old in names.items() if old in empty}
        self._names = {name: old for name, old in names.items() if old not in empty}
        self._wrapped = frozenset(name for name, old in self._names.items() if old in boxed)
        self._chosen = frozenset(self._names.values())
        unfit: dict[str, str] = {}
        if self._filled:
            self._prune()
            unfit = self._grow(stored)
        wanted = {name: value for name, value in self.state_dict.items() if self.fit.takes(name)}
        missing = [name for name in wanted if name not in self._names]
        unfit |= self._unfit(wanted, stored)
        if unfit or (missing and self.fit.missing == "error"):
            self._refuse(missing if self.fit.missing == "error" else [], unfit)
        if missing and self.fit.missing == "warn":
            logger.warning(
                "%s: %d values of the state are not in the checkpoint, and stay as the program made them: %s",
                self._source,
                len(missing),
                ", ".join(map(repr, missing)),
            )
        items: list[ReadItem] = []
        for name, value in wanted.items():
            if (old := self._names.get(name)) is not None:
                items += _read_items(name, value, old, stored[old])
        return LoadPlan(items)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """All ranks' states fit. Put what is empty, which nothing is read for, into the state where it takes all: the
        dicts that were saved, and tensors without elements.
        """
        for name, path in self._empty.items():
            if is_under(name, self._filled):
                put(self.original_state_dict, path, None)
        for name, path in self._grown.items():
            value = self.state_dict[name]
            if isinstance(value, torch.Tensor) and not value.numel():
                put(self.original_state_dict, path, value)
        return new_plan

    @property
    def held(self) -> list[str]:
        """The stored names of what is in the state."""
        return [old for name, old in self._names.items() if name in self.state_dict]

    def unasked(self, unread: Iterable[str]) -> list[str]:
        """Those of the stored names that no rank reads which are not left out on purpose.

        Raises :class:`IncompatibleStateError` if one of them is needed.
        """
        left = [name for name in unread if name in self._chosen]
        if lost := [name for name in left if name in self._needed]:
            owners = {self._needed[name] for name in lost}
            kept = {owner for name, owner in self._needed.items() if name not in lost}
            out = ", ".join(map(repr, sorted(owners))) if owners.isdisjoint(kept) else "…"
            raise IncompatibleStateError(
                f"{self._source}: nothing in the program takes {len(lost)} values of "
                f"{'the optimizer' if len(owners) == 1 else 'the optimizers'} {some_of(sorted(owners))}: "
                f"{some_of(lost)}. Ways out: rename={{old: new}}, exclude=[{out}]. Nothing was changed.",
                unexpected=lost,
            )
        return left

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of a tensor of the state that the item fills."""
        value = self.state_dict[read_item.dest_index.fqn]
        if type(value) in _PLAIN and value.shape == read_item.lengths:  # all of it
            return cast(torch.Tensor, value)
        return super().resolve_tensor(read_item)  # type: ignore[no-any-return]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object into the state."""
        name = read_item.dest_index.fqn
        path = self._grown.get(name, self._paths.get(name, (name,)))
        put(self.original_state_dict, path, torch.load(value, weights_only=False))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Put a tensor that the state did not have into it."""
        name = read_item.dest_index.fqn
        if (path := self._grown.get(name)) is not None:
            put(self.original_state_dict, path, self.state_dict[name])

    def _prune(self) -> None:
        """Remove what is not stored from what is to become exactly what is stored; and a None, or an empty list,
        where more is stored.
        """
        known = frozenset(chain.from_iterable(map(prefixes_of, (*self._names, *self._empty))))
        replaced = self._replaced & known
        for name in reversed(list(self.state_dict)):  # of a list, its last elements first
            if name in self._names or not self.fit.takes(name):
                continue
            if is_under(name, replaced):
                _remove(self.original_state_dict, self._paths[name])
                del self.state_dict[name]
            elif (
                name in known and is_under(name, self._filled) and _is_empty(self.state_dict[name])
            ):
                del self.state_dict[name]  # a dict or list comes to be there

    def _grow(self, stored: Mapping[str, STORAGE_TYPES]) -> dict[str, str]:
        """Make room for what is stored below names that take all of it. Returns where that cannot be, and why."""
        assert self.metadata is not None
        replaced = {name: self.state_dict[name] for name in self._names if self._may_replace(name)}
        outgrown = [name for name, _ in self._unfit(replaced, stored)]
        new = [name for name in self._unasked() if is_under(name, self._filled)]
        unfit = self._in_the_way(new)
        for name in [*new, *outgrown]:
            old = self._names[name]
            entry = stored[old]
            value = None
            if isinstance(entry, TensorStorageMetadata):
                value = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            self.state_dict[name] = value
            self._grown[name] = self._path(name, old)
        return unfit

    def _path(self, name: str, old: str) -> KeyPath:
        """Where the value called ``name``, which is stored as ``old``, comes to be."""
        assert self.metadata is not None
        return renamed_path(path_of(old, self.metadata.planner_data), old, name)

    def _in_the_way(self, new: list[str]) -> dict[str, str]:
        """The names of values of the state where a dict was saved, or the reverse; and that, in words."""
        held = frozenset(chain.from_iterable(map(prefixes_of, self.state_dict))) if new else ()
        found = {name: "saved as a value, here a dict" for name in new if name in held}
        for name in new:
            for prefix in prefixes_of(name):
                if prefix in self.state_dict:
                    kind = type(self.state_dict[prefix]).__name__
                    found[prefix] = f"saved as a dict or a list, here a {kind}"
        return found

    def _may_replace(self, name: str) -> bool:
        """Whether there is a value, and a new tensor may come to be in its place: it is no shard."""
        if name not in self.state_dict or not is_under(name, self._replaced):
            return False
        value = self.state_dict[name]
        return not isinstance(value, torch.Tensor) or type(value) in _PLAIN

    def _unasked(self) -> list[str]:
        """The names to load that the state does not have, neither itself nor in a wrapper."""
        opened = self._wrapped.intersection(self.state_dict)
        return [
            name
            for name in self._names
            if not (name in self.state_dict or name in self._wrapped or is_under(name, opened))
        ]

    def _unfit(
        self, wanted: Mapping[str, Any], stored: Mapping[str, STORAGE_TYPES]
    ) -> Iterator[tuple[str, str]]:
        """The names of values that cannot receive what is stored under the same name, and why, in words."""
        for name, value in wanted.items():
            old = self._names.get(name)
            entry = None if old is None else stored[old]
            if not isinstance(entry, TensorStorageMetadata):
                continue
            size = getattr(value, "size", None)
            if not callable(size):
                yield (
                    name,
                    f"saved as a tensor of {tuple(entry.size)}, here a {type(value).__name__}",
                )
            elif size() != entry.size:
                yield name, f"saved with {tuple(entry.size)}, here {tuple(size())}"
            elif value.dtype != entry.properties.dtype and not self.fit.cast:
                yield name, f"saved as {entry.properties.dtype}, here {value.dtype}"

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


def _read_items(name: str, value: Any, old: str, entry: STORAGE_TYPES) -> list[ReadItem]:
    """What the value called ``name`` needs of what is stored as ``old``, as DCP plans it."""
    if _takes_one_chunk(value, entry):  # DCP's planner takes long to see that
        chunk = entry.chunks[0]  # type: ignore[union-attr]
        here = MetadataIndex(name, chunk.offsets, 0)
        return [
            ReadItem(
                LoadItemType.TENSOR,
                dest_index=here,
                dest_offsets=chunk.offsets,
                storage_index=here if old == name else MetadataIndex(old, chunk.offsets, 0),
                storage_offsets=chunk.offsets,
                lengths=chunk.sizes,
            )
        ]
    items = create_default_local_load_plan({name: value}, Metadata({name: entry})).items
    if name == old:
        return items
    return [replace(item, storage_index=replace(item.storage_index, fqn=old)) for item in items]


def _takes_one_chunk(value: Any, entry: STORAGE_TYPES) -> bool:
    """Whether ``value`` is a plain tensor with elements, and all of it is stored as one chunk."""
    return (
        isinstance(entry, TensorStorageMetadata)
        and type(value) in _PLAIN
        and len(entry.chunks) == 1
        and entry.chunks[0].sizes == value.shape
        and value.numel() > 0
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
