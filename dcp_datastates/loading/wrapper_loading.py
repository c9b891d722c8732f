"""Loads wrapper subclasses from the parts that are stored of them (:mod:`dcp_datastates.io.tensor_memory`).

If the same shard is stored, its parts are read into the inner tensors of the destination. If other shards are stored,
each is built anew, sliced, and copied with ``copy_``, as DCP does: the class decides where its tensors can be cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.format.key_paths import flatten
from dcp_datastates.format.stored_names import WRAPPER, Box, is_under, shard_name
from dcp_datastates.io.reads import Reads
from dcp_datastates.io.tensor_memory import box, is_wrapper, kind, local_tensor, parts
from dcp_datastates.loading.stored import Stored, cut, shards_of

Read = Callable[[Reads], None]


class Wrappers:
    """The wrappers of a state that are to be loaded. Making it checks all of them, and changes none.

    Args:
        wanted: the values of the state, by their names there, each with the name under which it is stored.
        stored: the checkpoint.
        read: reads tensors.

    Raises :class:`IncompatibleStateError` for a value that is no wrapper, or one of another class or context than the
    stored one; and what ``read`` raises.
    """

    def __init__(self, wanted: Mapping[str, tuple[str, Any]], stored: Stored, read: Read) -> None:
        self._stored, self._read = stored, read
        self._direct: dict[str, torch.Tensor] = {}
        """The inner tensors of wrappers whose shard is stored as it is, by the names of the stored parts."""
        self._cut: list[tuple[str, torch.Tensor, dict[str, Box]]] = []
        """The names of other wrappers, these, and the stored shards that they need, by the prefixes of their parts."""
        self.unread: list[str] = []
        """Stored parts that the wrappers lack: some classes leave out a part that is None."""
        needed = {
            name: _needed(name, value, stored.wrappers[old])
            for name, (old, value) in wanted.items()
        }
        if not needed:
            return
        prefixes = frozenset(chain.from_iterable(needed.values()))
        texts = self._new(f"{prefix}.{WRAPPER}" for prefix in prefixes)
        self._fill(texts)
        held: set[str] = set()
        for name, (_, value) in wanted.items():
            for prefix in needed[name]:
                _check_kind(name, value, bytes(texts[f"{prefix}.{WRAPPER}"].numpy()).decode())
                inner, _ = flatten({prefix: parts(local_tensor(value))})
                held |= inner.keys()
            if box(value) in needed[name].values():
                self._direct.update(self._matching(name, inner))
            else:
                self._cut.append((name, value, needed[name]))
        under = (each for each in stored if is_under(each, prefixes))
        self.unread += [each for each in under if each not in held]

    def load(self) -> None:
        """Fill them, in place.

        Raises :class:`IncompatibleStateError` for shards that cannot be cut as this state needs them; and what ``read``
        raises.
        """
        self._fill(self._direct)
        for each in self._cut:
            self._reshard(*each)

    # ---- within ------------------------------------------------------------------------------------

    def _fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read ``tensors``, by their full names."""
        if tensors:
            shards = shards_of(tensors, tensors.values())
            self._read(self._stored.into(list(tensors), shards))

    def _new(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """New tensors on the host, for parts of these names."""
        made = {}
        for name in names:
            tensor = self._stored.new(name) if name in self._stored else None
            if tensor is None:
                raise IncompatibleStateError(f"the checkpoint has no tensor {name!r}")
            made[name] = tensor
        return made

    def _matching(
        self, name: str, inner: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of the ``inner`` tensors that are read, by the names of the stored parts, which fit them."""
        for part, tensor in inner.items():
            entry = self._stored.get(part)
            size = None if entry is None else entry.size
            if part.endswith(f".{WRAPPER}"):
                continue
            if size != tensor.shape:
                raise IncompatibleStateError(
                    f"{name!r}: its part {part!r} has the shape {tuple(tensor.shape)} in the state, and "
                    f"{'is not stored' if size is None else f'was saved with {tuple(size)}'}; {_way_out(name)}"
                )
            yield part, tensor

    def _reshard(self, name: str, value: torch.Tensor, needed: Mapping[str, Box]) -> None:
        """Copy the stored shards into the local shard of ``value``."""
        place, local = box(value), local_tensor(value).detach()
        names, context = local.__tensor_flatten__()  # type: ignore[attr-defined]
        left = _volume(place)
        for prefix, there in needed.items():
            both = _overlap(place, there)
            inner = self._new(f"{prefix}.{each}" for each in names)
            self._fill(inner)
            try:
                sizes = torch.Size(end - begin for begin, end in there)
                strides = torch.empty(sizes, dtype=local.dtype, device="meta").stride()
                saved = type(local).__tensor_unflatten__(  # type: ignore[attr-defined]
                    dict(zip(names, inner.values(), strict=True)), context, sizes, strides
                )
                if saved.shape != sizes:
                    raise ValueError(f"it has the shape {tuple(saved.shape)}")
                _cut(local, place, both).copy_(_cut(saved, there, both))
            except Exception as error:
                raise IncompatibleStateError(
                    f"{name!r}: this rank needs {shard_name(both)} of the stored shard {shard_name(there)}, and "
                    f"{type(local).__name__} cannot be cut so ({error}); load it with the shards that were saved"
                ) from error
            left -= _volume(both)
        if left:
            raise IncompatibleStateError(
                f"of {name!r}, {left} elements that this rank needs are not stored (a rank saved its shard alone?)"
            )


def _needed(name: str, value: Any, shards: Mapping[str, Box | None]) -> dict[str, Box]:
    """The stored ``shards`` that this rank needs, by prefix: the one at the place of its own, or all that overlap with
    it. None is the place of a whole wrapper.

    Of a value that is no wrapper, for which :func:`_check_kind` raises, any shard.
    """
    if not is_wrapper(value):
        return {next(iter(shards)): ()}
    whole = tuple((0, size) for size in value.shape)
    mine = box(value)  # DCP plans nothing for a rank outside the mesh
    places = {prefix: place or whole for prefix, place in shards.items()}
    ends = zip(*([end for _, end in place] for place in places.values()), strict=False)
    saved = tuple(map(max, ends))
    if saved != value.shape:
        raise IncompatibleStateError(
            f"{name!r} has the shape {tuple(value.shape)} in the state, and was saved with {saved}; {_way_out(name)}"
        )
    same = {prefix: there for prefix, there in places.items() if there == mine}
    return same or {
        prefix: there
        for prefix, there in places.items()
        if all(begin < end for begin, end in _overlap(there, mine))
    }


def _check_kind(name: str, value: Any, saved: str) -> None:
    mine = kind(local_tensor(value)) if is_wrapper(value) else type(value).__name__
    if mine != saved:
        raise IncompatibleStateError(
            f"{name!r} was saved as a {saved}, and the state has a {mine}; {_way_out(name)}"
        )


def _way_out(name: str) -> str:
    return (
        f"load into a tensor of the saved class and form, or load its parts as plain tensors with "
        f"dcp_datastates.load(path, only={name!r})"
    )


def _overlap(one: Box, other: Box) -> Box:
    """What two boxes have in common; dimensions may end before they begin."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def _volume(place: Box) -> int:
    """The number of elements."""
    return math.prod(end - begin for begin, end in place)


def _cut(tensor: torch.Tensor, place: Box, part: Box) -> torch.Tensor:
    """The ``part`` of a tensor that lies at ``place``."""
    begins = [begin - origin for (begin, _), (origin, _) in zip(part, place, strict=True)]
    return cut(tensor, begins, [end - begin for begin, end in part])
