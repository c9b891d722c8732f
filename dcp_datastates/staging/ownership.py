"""Ownership: which tensors an optimizer owns. Only these may be read after ``async_save`` has returned.

The tensors that an optimizer owns (its parameters, its state) change in its ``step()``, where the step gate waits. This
module learns of an optimizer at its first step, or from :func:`track`.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import weakref
from collections.abc import Collection, Iterable, Sequence
from itertools import compress
from typing import Any, Final

import torch
from torch.optim import Optimizer

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.io.tensor_memory import inner_tensors, layers

logger = logging.getLogger(__name__)

STABLE: Final = 0
"""Group of memory that does not change: copies made at the call, serialized objects."""

UNOWNED: Final = 1
"""Group of deferred tensors that no known optimizer owns (``reads="all"``)."""

_FIRST_OWNED: Final = 2
_PLAIN_TYPES: Final = frozenset({torch.nn.Parameter, torch.Tensor})

# No lock: the hook before a step runs in children, too, and single operations of dicts and sets are atomic.
_known: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()
_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_captured: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_torn: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers whose tensors something else has changed under a deferred read."""

_ALSO: Final = "_dcp_datastates_also"
"""The attribute of an optimizer that holds the further tensors passed to :func:`track`.

They live as long as their optimizer. Weak references to tensors would keep torch from swapping them (``swap_tensors``,
and so ``Module.to`` under FSDP2). Optimizers neither pickle nor copy attributes that they do not know.
"""


def never_defer(optimizer: Optimizer) -> None:
    """Note that a step of ``optimizer`` is captured into a graph: no hook is called before its replays."""
    _known[optimizer] = None
    _captured.add(optimizer)


def stepped(optimizer: Optimizer) -> None:
    """Note that ``optimizer`` steps outside a graph capture. Keeps a weak reference."""
    if optimizer not in _stepped:
        _known[optimizer] = None
        _stepped.add(optimizer)


def _is_announced(optimizer: Optimizer) -> bool:
    """Whether a hook is called before every change that ``optimizer`` makes."""
    if optimizer in _captured or optimizer in _torn:
        return False
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        return False  # schedule-free optimizers exchange the parameters there
    # A capturable optimizer may have been captured before this module knew it, unless it has been seen to step.
    # (torch.compile sets ``capturable``, and calls the hooks.)
    return optimizer in _stepped or not any(
        group.get("capturable") for group in optimizer.param_groups
    )


def track(optimizer: Optimizer, also: Iterable[torch.Tensor] = ()) -> None:
    """Register an optimizer before its first ``step()``, so that even the first save defers its tensors.

    Otherwise the first save of a job copies all tensors inside ``async_save``. After a torn save, the optimizer's
    tensors are copied at the call; another ``track`` defers them again. Keeps only a weak reference to the optimizer.

    Args:
        optimizer: The optimizer.
        also: Further tensors that change only in ``step()``, or after it and before the next save, such as the
            low-precision parameters into which mixed precision copies the optimizer's. They are deferred and gated like
            the optimizer's own tensors, and live as long as the optimizer. Replaces those of an earlier call.

    Raises:
        ConfigurationError: ``optimizer`` is no :class:`torch.optim.Optimizer`, or ``also`` has something other than
            tensors.

    Threads: any.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"track() takes a torch.optim.Optimizer, not a {type(optimizer).__name__}; what another "
            f"object updates cannot be deferred, because nothing announces its step"
        )
    further = [also] if isinstance(also, (torch.Tensor, torch.nn.Module)) else list(also)
    for each in further:
        if not isinstance(each, torch.Tensor):
            raise ConfigurationError(
                f"track(also=…) takes tensors, not a {type(each).__name__}; of a module, pass module.parameters()"
            )
    vars(optimizer)[_ALSO] = further
    _known[optimizer] = None
    _torn.discard(optimizer)


def known_optimizers() -> list[Optimizer]:
    """The live optimizers that have stepped or were passed to :func:`track`."""
    return [each for known in _known.keyrefs() if (each := known()) is not None]


def _owned(optimizer: Optimizer) -> list[torch.Tensor]:
    """The tensors that ``optimizer`` owns; step counts on the host are left out."""
    tensors: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        tensors += group["params"]
    for state in optimizer.state.values():
        if isinstance(state, dict):
            # On the host, step counts are too small to be deferred, and there are many.
            tensors += [
                value
                for name, value in state.items()
                if name != "step" or (isinstance(value, torch.Tensor) and not value.is_cpu)
            ]
    tensors += vars(optimizer).get(_ALSO, ())
    if set(map(type, tensors)) <= _PLAIN_TYPES:
        return tensors
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def by_storage(
    tensors: list[torch.Tensor],
) -> tuple[list[torch.UntypedStorage], list[torch.Tensor]]:
    """The storages of ``tensors``, and for each the tensor: a wrapper or a DTensor for those of its inner tensors."""
    if set(map(type, tensors)) <= _PLAIN_TYPES:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # one has no storage: sparse
            return list(map(torch.Tensor.untyped_storage, tensors)), tensors
    pairs = [
        (inner.untyped_storage(), tensor)
        for tensor in tensors
        for inner in inner_tensors(tensor)
        if _has_storage(inner)
    ]
    return [storage for storage, _ in pairs], [tensor for _, tensor in pairs]


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return False
    return True


class Ownership:
    """The tensors that every known optimizer owns at the time of the call.

    Tensors are identified by storage, so views and ``detach()`` of an owned tensor are owned. Each optimizer's tensors
    form a *group*, for which its gate waits; storages with several owners form a separate group per set of owners.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        # Storage objects compare by identity; torch keeps one per storage while it is referenced.
        self._group_of_storage: dict[torch.UntypedStorage, int] = {}
        self._owners: dict[int, frozenset[int]] = {}
        self._unannounced: set[torch.UntypedStorage] = set()
        self._optimizers = list(optimizers)  # strong references keep their ids unique
        self.distrusted = not _torn.isdisjoint(self._optimizers)
        """Whether something else than an optimizer's step has written to what one of them owns."""
        self._held: list[tuple[list[torch.UntypedStorage], list[torch.Tensor]]] = []
        """Of each optimizer, the storages and the tensors over them, as of :func:`by_storage`."""
        group_of_owners: dict[frozenset[int], int] = {}
        announced = list(map(_is_announced, self._optimizers))
        for optimizer in compress(self._optimizers, announced):
            self._add(optimizer, group_of_owners)
        for optimizer in compress(self._optimizers, map(operator.not_, announced)):
            for storage in by_storage(_owned(optimizer))[0]:  # other optimizers may own it, too
                self._group_of_storage.pop(storage, None)
                self._unannounced.add(storage)

    def _add(self, optimizer: Optimizer, group_of_owners: dict[frozenset[int], int]) -> None:
        groups = self._group_of_storage
        mine = self._group(frozenset({id(optimizer)}), group_of_owners)
        storages, tensors = by_storage(_owned(optimizer))
        self._held.append((storages, tensors))
        if groups.keys().isdisjoint(storages):
            groups.update(dict.fromkeys(storages, mine))
        else:
            for storage in storages:
                owners = self._owners[groups.get(storage, mine)] | self._owners[mine]
                groups[storage] = self._group(owners, group_of_owners)

    def _group(self, owners: frozenset[int], group_of_owners: dict[frozenset[int], int]) -> int:
        group = group_of_owners.setdefault(owners, _FIRST_OWNED + len(group_of_owners))
        self._owners[group] = owners
        return group

    def groups(self, storages: list[torch.UntypedStorage]) -> list[int | None]:
        """Each storage's group, or None if no optimizer owns it."""
        return list(map(self._group_of_storage.get, storages))

    def tensors_over(self, storages: Collection[torch.UntypedStorage]) -> list[torch.Tensor]:
        """The optimizers' tensors over any of ``storages``, with all their layers: each has a version counter."""
        found: list[torch.Tensor] = []
        for mine, tensors in self._held:
            over = compress(tensors, map(storages.__contains__, mine))
            if set(map(type, tensors)) <= _PLAIN_TYPES:
                found += over
            else:
                found += [layer for tensor in over for layer in layers(tensor)]
        return found

    def storages_under(self, tensor: torch.Tensor) -> set[torch.UntypedStorage]:
        """The storages that ``tensor``, one of :meth:`tensors_over`, had at the call."""
        return {
            storage
            for storages, tensors in self._held
            for storage, owned in zip(storages, tensors, strict=True)
            if any(layer is tensor for layer in layers(owned))
        }

    def stop_deferring(self, group: int) -> None:
        """Copy the tensors of the owners of ``group`` at the call from the next save on: something else writes to them
        between the call and the step.
        """
        owners = self._owners.get(group, frozenset())
        for optimizer in self._optimizers:
            if id(optimizer) not in owners or optimizer in _torn:
                continue
            _torn.add(optimizer)
            logger.warning(
                "from now on, saves copy the tensors of %s at the call: a save of them was torn. track(optimizer) "
                "defers them again",
                type(optimizer).__name__,
            )

    def owns(self, tensors: list[torch.Tensor]) -> tuple[bool, ...]:
        """Whether an optimizer owns each of the (local) tensors, in any group or none."""
        try:
            storages = list(map(torch.Tensor.untyped_storage, tensors))
        except (RuntimeError, NotImplementedError):  # one has no storage
            return tuple(_has_storage(each) and self.owns([each])[0] for each in tensors)
        known = self._group_of_storage
        return tuple([storage in known or storage in self._unannounced for storage in storages])

    def may_change(self, optimizer: Optimizer, group: int, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a step of ``optimizer`` may legitimately change the (local) ``tensors`` of ``group``."""
        if group == UNOWNED or id(optimizer) in self._owners.get(group, frozenset()):
            return True
        return not set(by_storage(_owned(optimizer))[0]).isdisjoint(by_storage(list(tensors))[0])

    def is_gated_by(self, group: int, optimizer: Any) -> bool:
        """Whether ``optimizer`` may change tensors of ``group`` when it steps.

        An optimizer that was unknown at the call may change any tensor. And the code around a step may change tensors
        that no optimizer owns.
        """
        if optimizer not in self._optimizers:
            return True
        return group == UNOWNED or id(optimizer) in self._owners.get(group, frozenset())
