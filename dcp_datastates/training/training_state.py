"""What a training loop consists of, as a state that can be saved, and back.

Models and optimizers are named as in ``models.py`` and ``optimizers.py``, and everything else is as DCP has it;
but what differs between ranks gets a name for each rank.

The parts are objects with ``state_dict()`` and ``load_state_dict()``, which DCP calls: so a part that fails to give its
state fails the save on all ranks.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Final

import torch
from torch.distributed.checkpoint.stateful import Stateful

from dcp_datastates.errors import ConfigurationError, IncompatibleStateError
from dcp_datastates.format.stored_names import NamePatterns, new_name, prefixes_of, renamed
from dcp_datastates.io.tensor_memory import is_wrapper
from dcp_datastates.loading.fit import Answer, Fit
from dcp_datastates.loading.fitting import Fitting
from dcp_datastates.loading.load import load_values, load_with
from dcp_datastates.loading.session import LoadSession
from dcp_datastates.loading.stored import Stored
from dcp_datastates.planning.column_planning import serialize
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.training.models import ModelPart, Trainable, are_parts, names_below
from dcp_datastates.training.optimizers import OptimizerPart
from dcp_datastates.training.per_rank import PerRank, RngState, differs

logger = logging.getLogger(__name__)

_RANK: Final = "rank-"
_PACKED: Final = "packed"
"""The name, below that of an object, of a state that DCP would change: it is stored as ``torch.save`` writes it."""
_RESERVED: Final = re.compile(rf"{_PACKED}|{_RANK}\d+")


@dataclass
class _Own:
    """What each rank has for itself."""

    marked: PerRank
    rank: int
    to_load: Sequence[int] | None = None
    """The ranks whose states are to be loaded; None for a save."""
    make: Callable[[list[Any]], Any] = itemgetter(0)
    """Makes this rank's state of those that were loaded."""

    def state_dict(self) -> dict[str, Any]:
        if self.to_load is not None:  # a loader that is asked for its state may start its workers
            return {f"{_RANK}{rank}": b"" for rank in self.to_load}
        return {f"{_RANK}{self.rank}": serialize(self.marked.wrapped.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: :meth:`TrainingState.load` gives the object its state last."""

    def fit(self, name: str, saved_by: int, world: int, missing: Answer) -> bool:
        """Prepare to load what ``saved_by`` ranks have saved under ``name``; whether that is possible.

        Raises :class:`IncompatibleStateError` if a position would be lost, unless ``missing`` allows that.
        """
        self.to_load = [self.rank]
        if saved_by in (0, world):
            return True
        if self.marked.merge is not None:
            self.to_load, self.make = range(saved_by), self.marked.merge
            return True
        said = f"{name!r} was saved by {saved_by} ranks, and there are {world} now"
        is_position = not isinstance(self.marked.wrapped, RngState)
        if is_position and missing == "error":
            raise IncompatibleStateError(
                f"{said}: PerRank(…, merge=function) gives the function all states that were stored, and restores what "
                f'it returns; exclude={name!r} or missing="warn" keeps the object as the program made it. Nothing was '
                f"changed.",
                missing=[name],
            )
        if not is_position or missing == "warn":
            logger.warning("%s: it stays as it is", said)
        return False


@dataclass
class _Object:
    """An object of the user's. It receives all that was saved of it."""

    value: Stateful
    given: bytes | None = None
    """What a load is given to replace, if it is packed."""

    def state_dict(self) -> dict[str, Any]:
        state = self.value.state_dict()
        if not _keeps_its_types(state):
            self.given = serialize(state)
            return {_PACKED: self.given}
        copied = _containers_copied(state)
        return dict(copied) if isinstance(state, Mapping) else {_PACKED: copied}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        found = state.get(_PACKED, state) if isinstance(state, Mapping) else state
        if self.given is None or found is not self.given:
            self.value.load_state_dict(found)


class TrainingState:
    """The objects and values of a loop, by name, as the user passes them.

    Args:
        given: models, optimizers, objects with ``state_dict()`` and ``load_state_dict()``, tensors, values, and dicts
            and lists of them. A list of modules is one model in parts if each name is that of one parameter.

    Raises:
        ConfigurationError: a name is no string, or is that of two parts; a dict contains itself.
    """

    def __init__(self, given: Mapping[str, Any], rank_set: RankSet) -> None:
        if not isinstance(given, Mapping):
            raise ConfigurationError(
                f"the state is a {type(given).__name__}; pass a dict of names to models, optimizers and values"
            )
        self._rank_set = rank_set
        self._given = _parted(given)
        values = {name: inside[key] for name, (inside, key) in self._given.items()}
        self._models = {
            name: ModelPart(value).modules for name, value in values.items() if _is_model(value)
        }
        self.parts = {name: self._part(name, value) for name, value in values.items()}
        """The state, for ``async_save``."""

    def per_rank(self) -> list[Stateful]:
        """The objects whose states differ between ranks."""
        return [part.marked.wrapped for part in self.parts.values() if isinstance(part, _Own)]

    def load(
        self,
        session: LoadSession,
        fit: Fit,
        only: Collection[str] | None = None,
        share_reads: bool | None = None,
    ) -> None:
        """Load what ``fit`` takes of the checkpoint, all ranks together.

        What the checkpoint has for another number of ranks is merged, refused or left out. Values, which
        have no ``load_state_dict()``, are put into the user's dict. Then the ranks are given their own states: the
        random generators last, since what comes before may draw from them.

        Args:
            only: the parts to load, without any other stored value; None: all.
            share_reads: as for ``load_with``.
        """
        loaded = {n: part for n, part in self.parts.items() if only is None or n in only}
        prepare = partial(self._prepare, loaded, fit, only is not None)
        fitting = load_with(session, loaded, prepare, share_reads)
        own = [(name, part) for name, part in loaded.items() if isinstance(part, _Own)]
        for name, value in loaded.items():
            if value is self.parts[name]:
                continue
            inside, key = self._given[name]
            if not isinstance(inside, (dict, list)):
                raise ConfigurationError(
                    f"{name!r} lies in a {type(inside).__name__}; it must be a dict or a list to receive the value"
                )
            inside[key] = value
        for name, part in sorted(own, key=lambda o: isinstance(o[1].marked.wrapped, RngState)):
            olds = (fitting.names.get(f"{name}.{each}") for each in part.state_dict())
            states = [fitting.objects[old] for old in olds if old in fitting.objects]
            if states:
                part.marked.wrapped.load_state_dict(part.make(states))

    def _prepare(self, loaded: dict[str, Any], fit: Fit, alone: bool, stored: Stored) -> Fitting:
        """Prepare the parts in ``loaded`` for what is stored; take those out of it that stay as they are. ``alone``:
        no other stored value counts.
        """
        if alone:
            known = fit.names(stored)
            for name, part in list(loaded.items()):
                # As a name to load, it would be an error.
                if not (names_below(known, name) or (fit.missing == "error" and part.state_dict())):
                    del loaded[name]
            fit = replace(fit, only=NamePatterns("only", loaded))
        optimizers = [part for part in loaded.values() if isinstance(part, OptimizerPart)]
        fit, needed = load_options(fit, stored, optimizers)
        names = frozenset(fit.names(stored))
        filled, replaced, left_out, packed_in = [], [], [], []
        for name, part in list(loaded.items()):
            below = names_below(names, name)
            if isinstance(part, ModelPart):
                part.stored = below
            elif isinstance(part, _Own):
                found = [f"{name}.{each}" for each in below if each.startswith(_RANK)]
                packed_in += found
                if not part.fit(name, len(found), self._rank_set.world, fit.missing):
                    del loaded[name]
                    left_out.append(name)
            elif isinstance(part, _Object):
                if below - {_PACKED} and all(map(_RESERVED.fullmatch, below)):
                    raise IncompatibleStateError(
                        f"{name!r} was saved as a PerRank(…), and the program has not marked it: mark it, or pass "
                        f"exclude={name!r}, which keeps it as the program made it. Nothing was changed.",
                        missing=[name],
                    )
                replaced.append(name)
                packed_in.append(f"{name}.{_PACKED}")
            elif not isinstance(part, (torch.Tensor, OptimizerPart)):
                filled.append(name)
        fitting = Fitting(
            fit.without(left_out),
            stored,
            filled=filled,
            replaced=replaced,
            needed=needed,
            packed=packed_in,
        )
        read = partial(load_values, allow_objects=fit.allow_objects)
        for each in optimizers:
            each.lay_out(fitting.names, stored, read)
        return fitting

    def _part(self, name: str, value: Any) -> Any:
        if (mine := differs(value)) is not None:
            return _Own(mine, self._rank_set.rank)
        if _is_model(value):
            return ModelPart(value)
        if isinstance(value, type) and isinstance(value, Stateful):
            raise ConfigurationError(
                f"the part {name!r} is the class {value.__name__}, not an object"
            )
        if isinstance(value, torch.optim.Optimizer):
            alone = self._rank_set.world == 1
            return OptimizerPart(name, value, self._models, None if alone else self._rank_set.rank)
        if _has_state(value):
            return _Object(value)
        return value


# ---- the names that a load takes: optimizers follow a rename of their model, none is lost in silence


_GROUP: Final = re.compile(r"(.+?)\.groups\..+\.[0-9a-f]{8}")
"""The name of a group, which begins with that of its optimizer."""


def load_options(
    fit: Fit, stored: Iterable[str], optimizers: Iterable[OptimizerPart]
) -> tuple[Fit, dict[str, str]]:
    """Prepare optimizers for a load: returns ``fit``, whose ``rename`` of a model renames the parameters of its
    optimizer, too; and the stored names that some rank must take, so that no state is lost in silence, each with the
    name of its optimizer. That may be one that this rank does not have.
    """
    stored = list(stored)
    for each in optimizers:
        each.fit, each.renamed = fit, str
        fit = _following(fit, stored, each)
    needed: dict[str, str] = {}
    names = fit.names(stored)
    for each in optimizers:
        each.fit = fit
    in_groups = {found[1] for name in names if (found := _GROUP.fullmatch(name))}
    for optimizer in {each.name for each in optimizers} | in_groups:
        below = tuple(f"{optimizer}.{section}." for section in ("state", "params", "groups"))
        needed.update({old: optimizer for name, old in names.items() if name.startswith(below)})
    return fit, needed


def _following(fit: Fit, stored: Sequence[str], part: OptimizerPart) -> Fit:
    given = fit.rename
    if given is None:
        return fit
    of_models = renamed(stored, given)
    live, start = part.live(), f"{part.name}.state."
    by_old: dict[str, str] = {}
    for name, full in sorted(live.names.in_model.items(), key=lambda each: each[1].count(".")):
        for place, letter in enumerate(old := f".{of_models.get(full, full)}"):
            if letter == ".":
                by_old.setdefault(old[place + 1 :], name)

    def rename(old: str) -> str:
        name, _ = new_name(old, given)
        if not name.startswith(start) or not old.endswith(name[len(part.name) :]):
            return name  # it is renamed by itself
        rest = name.removeprefix(start)
        for prefix in sorted(prefixes_of(rest), key=len, reverse=True):
            if prefix in by_old:
                return start + by_old[prefix] + rest.removeprefix(prefix)
        return name

    optimizers = [old for old in stored if new_name(old, given)[0].startswith(start)]
    if optimizers:
        old = optimizers[0]
        before = old[: old.rindex(".state.") + len(".state.")]
        part.renamed = lambda name: rename(f"{before}{name}.").removeprefix(start).removesuffix(".")
    return replace(fit, rename=rename)


# ---- kinds of parts ------------------------------------------------------------------------------


def _keeps_its_types(value: Any) -> bool:
    """Whether a state comes back from DCP as it was: with strings as keys, plain dicts and lists, none empty within.

    One with sharded tensors cannot be packed, and passes.
    """
    return (isinstance(value, Mapping) and _is_plain(value)) or _any_sharded(value)


def _is_plain(value: Any, top: bool = True) -> bool:
    if isinstance(value, Mapping):
        if type(value) not in (dict, OrderedDict) or (type(value) is OrderedDict and not top):
            return False
        if not value or (top and any(map(_RESERVED.fullmatch, map(str, value)))):
            return top and not value
        keys = all(type(key) is str for key in value)
        return keys and all(_is_plain(each, False) for each in value.values())
    if isinstance(value, (list, tuple)) and any(
        isinstance(each, (Mapping, list, tuple, torch.Tensor)) for each in value
    ):
        return type(value) is list and all(_is_plain(each, False) for each in value)
    return True  # DCP stores it as one value, with its type


def _any_sharded(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_any_sharded, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_any_sharded, value))
    return isinstance(value, torch.Tensor) and (is_wrapper(value) or hasattr(value, "placements"))


def _is_model(value: Any) -> bool:
    if isinstance(value, (list, tuple)) and value:
        return all(isinstance(each, torch.nn.Module) for each in value) and are_parts(value)
    return isinstance(value, (torch.nn.Module, Trainable))


def _parted(given: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """For each part by its name in DCP: what it lies in, and its key there.

    A dict, list or tuple is a part if it has tensors and values only. If an object with a state lies in it, at any
    depth, its values are parts: DCP would pickle such objects, and restore none.
    """
    found: dict[str, tuple[Any, Any]] = {}

    def look(inside: Any, path: str, around: tuple[int, ...]) -> None:
        for key, value in _items(inside):
            if not path and not isinstance(key, str):
                raise ConfigurationError(f"the state has the key {key!r}; names must be strings")
            name = f"{path}{key}"
            if not _is_model(value) and _holds_objects(value, name, around):
                look(value, f"{name}.", (*around, id(value)))
            elif name in found:
                raise ConfigurationError(f"two parts of the state have the name {name!r}")
            else:
                found[name] = inside, key

    look(given, "", (id(given),))
    return found


def _holds_objects(value: Any, name: str, around: tuple[int, ...]) -> bool:
    """Whether an object with a state lies in ``value``, a container. ``around``: the ids of what that lies in."""
    if id(value) in around:
        raise ConfigurationError(f"the part {name!r} of the state contains itself")
    if _has_state(value):
        return False
    return any(
        _has_state(each) or _holds_objects(each, name, (*around, id(value)))
        for _, each in _items(value)
    )


_HAVE_STATE: Final = (torch.nn.Module, torch.optim.Optimizer, PerRank)
_VALUES: Final = frozenset({int, float, bool, str, bytes, type(None)})


def _has_state(value: Any) -> bool:
    if isinstance(value, _HAVE_STATE):
        return True
    if type(value) in _VALUES or isinstance(value, (torch.Tensor, type)):
        return False
    return isinstance(value, Stateful)  # a protocol: the check takes 20 us


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


def _containers_copied(value: Any) -> Any:
    """``value`` with dicts and lists of its own."""
    if isinstance(value, Mapping):
        return {key: _containers_copied(each) for key, each in value.items()}
    if type(value) is list:
        return [_containers_copied(each) for each in value]
    return value
