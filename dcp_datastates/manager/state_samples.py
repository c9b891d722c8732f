"""Digests of what a loop's state holds: words of its tensors, its random generators, the places of its loaders.

The words lie where the number of the step says: a run that repeats a step exactly has the same digests.
"""

from __future__ import annotations

import logging
import math
import operator
import random
import struct
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, Final, NamedTuple
from weakref import ref

import torch
from torch.optim import Optimizer

from dcp_datastates._native import crc32c, sample_words
from dcp_datastates.io.tensor_memory import PLAIN_TYPES, is_unusual, local_tensor, local_tensors
from dcp_datastates.manager.models import ModelPart, Trainable
from dcp_datastates.manager.optimizers import OptimizerPart
from dcp_datastates.manager.per_rank import PerRank, RngState
from dcp_datastates.manager.training_state import TrainingState
from dcp_datastates.planning.samples import word_of
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.staging.ownership import known_optimizers

logger = logging.getLogger(__name__)

ON_HOST: Final = 32
"""How many tensors of the models, and of the optimizers, a step samples, in turns: each takes 0.35 us."""
_ON_DEVICE: Final = 16
"""The same where some are on a device: each takes a few kernels."""
_COMPARED: Final = 256
"""How many tensors of the models are compared from save to save, which takes 0.1 ms of the call."""
_PLACE_BYTES: Final = 32
_NUMPY_EVERY: Final = 8
"""NumPy's generator is looked at every so many steps: that takes 30 us."""
_LOOK_AGAIN: Final = 256
"""Modules are looked through again at the steps that are a multiple of this."""
_SLOW: Final = ((0.005, 256), (0.0002, 16), (0.0, 1))
"""Seconds that the state of the loaders takes, and at every how many steps it is then asked for."""

_VALUES: Final = frozenset({int, float, bool, str, bytes, type(None), torch.Tensor})
_PYTHON: Final = struct.Struct("625I")
_LOW_BYTE: Final = (255).__and__
_IS_CPU, _NBYTES, _TRAINED = map(operator.attrgetter, ("is_cpu", "nbytes", "requires_grad"))

Words = Callable[[], Sequence[int]]
"""Gives a number for each tensor. Waits if they are on a device: for a thread in the background."""


class Record(NamedTuple):
    """A step of one rank; digests are numbers."""

    world: int
    step: int
    loss: float
    """NaN if it is not known."""
    model: int
    optimizer: int
    generators: int
    loader: int | None
    """None: there is none, or it was not asked at this step."""
    tensors: bytes = bytes(2 * ON_HOST)
    """A byte of the digest of each tensor of the models that was sampled, then of the optimizers'; each in
    :data:`ON_HOST` bytes.
    """
    names: tuple[Sequence[str], Sequence[str]] = ((), ())
    """Of these tensors. They are not stored."""


class _Places:
    """Tensors, each in a dict under a key: a program may put another tensor there."""

    def __init__(self) -> None:
        self.dicts: list[Any] = []
        self.keys: list[Any] = []
        self.names: list[str] = []
        self.on_host = True
        self._pointers: dict[tuple[int, int], list[int]] = {}

    def add(self, inside: Any, key: Any, name: str) -> None:
        local = local_tensor(inside[key])
        if is_unusual(local):
            return
        if _is_whole(local):
            self.dicts.append(inside)
            self.keys.append(key)
            self.names.append(name)
            self.on_host = self.on_host and _IS_CPU(local)

    def _turn(self, step: int, most: int | None) -> slice:
        """Those that are sampled at this step."""
        most = most or (ON_HOST if self.on_host else _ON_DEVICE)
        turns = max(1, -(-len(self.keys) // most))
        return slice(step % turns, None, turns)

    def named(self, step: int) -> list[str]:
        """The names of those whose turn is ``step``, in the order of their words; none if some are on a device."""
        return self.names[self._turn(step, None)] if self.on_host else []

    def words(self, step: int, trained: bool, most: int | None = None) -> Words:
        """Words of those whose turn is ``step``; with ``trained``, of those that require a gradient."""
        turn = self._turn(step, most)
        found: list[Any] = list(map(operator.getitem, self.dicts[turn], self.keys[turn]))
        needed = list(map(_TRAINED, found)) if trained else [True] * len(found)
        tensors = local_tensors(found)  # held until the words are read
        if not set(map(type, tensors)) <= PLAIN_TYPES:
            raise TypeError("a tensor was replaced by one of another kind")
        is_host = list(map(_IS_CPU, tensors))
        host = list(compress(tensors, is_host))
        sizes = map(operator.mul, map(_NBYTES, host), compress(needed, is_host))
        pointers = list(map(torch.Tensor.data_ptr, host))
        if pointers != self._pointers.get(key := (turn.step, turn.start)):
            if not all(map(_is_whole, host)):
                raise ValueError("the memory of a tensor was freed")
            self._pointers[key] = pointers
        words = sample_words(pointers, list(sizes), step)
        device = list(compress(tensors, map(operator.gt, needed, is_host)))[:_ON_DEVICE]
        if not device:
            return lambda: words
        gathered = _gathered(device, step)
        return lambda: [*words, *gathered()]


def _is_whole(local: torch.Tensor) -> bool:
    """Whether a tensor has all of its memory: it is not expanded, and its storage was not cut."""
    begin = local.storage_offset() * local.element_size()
    return begin + local.nbytes <= local.untyped_storage().nbytes()


def _gathered(tensors: list[torch.Tensor], seed: int) -> Words:
    """A few bytes of each tensor of a device: copied to the host after the kernels that the program has started, which
    the caller does not wait for.
    """
    where, pieces = tensors[0].device, []
    for number, tensor in enumerate(tensors):
        flat = tensor.detach().reshape(-1)
        count = min(flat.numel(), max(1, _PLACE_BYTES // flat.element_size()))
        at = random.Random(seed << 8 | number).randint(0, flat.numel() - count)
        if tensor.device == where:  # a second device of a process is left out
            pieces.append(flat[at : at + count].view(torch.uint8))
    gathered = torch.cat(pieces)
    host = torch.empty(gathered.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
    host.copy_(gathered, non_blocking=True)
    copied = torch.cuda.current_stream(where).record_event()

    def take() -> list[int]:
        copied.synchronize()
        return [digest_of(host.numpy())]

    return take


class StateSamples:
    """Samples the state that a loop passes. The thread of the loop calls the methods.

    The modules and optimizers are looked up once, and again when other objects are passed.
    """

    def __init__(self, rank_set: RankSet) -> None:
        self._rank_set = rank_set
        self._loaders_every, self._has_asked = 1, False
        self.forget()

    def forget(self) -> None:
        """Hold nothing of the program's."""
        self._given: list[Any] = []
        self._known: list[int] = []
        self._entries: list[int] = []
        self._optimizers: list[ref[Optimizer]] = []
        self._models, self._moments = _Places(), _Places()
        self._loaders: list[Any] = []
        self.models: list[str] = []
        """The names of the models."""
        self.has_generators = False
        """Whether the state has a :class:`RngState`."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those of the state, and others that train its models."""
        return [found for each in self._optimizers if (found := each()) is not None]

    @property
    def has_loaders(self) -> bool:
        """Whether the state has something else that differs between ranks."""
        return bool(self._loaders)

    def at(
        self, state: Mapping[str, Any], step: int, loss: float = math.nan, loaders: bool = True
    ) -> Callable[[], Record]:
        """Sample ``state``. Without ``loaders``, these are not asked. A thread in the background makes the record of
        the result.
        """
        self._look(state, step)
        model = self._models.words(step, trained=True)
        moments = self._moments.words(step, trained=False)
        names = self._models.named(step), self._moments.named(step)
        generators, loader = _generators(step), self._places(step) if loaders else None

        def record() -> Record:
            words = [array("Q", each()) for each in (model, moments)]
            of_model, of_moments = map(digest_of, words)
            parts = (bytes(map(_LOW_BYTE, each))[:ON_HOST].ljust(ON_HOST, b"\0") for each in words)
            world, tensors = self._rank_set.world, b"".join(parts)
            digests = of_model, of_moments, generators(), loader
            return Record(world, step, loss, *digests, tensors, names)

        return record

    def trained(self, state: Mapping[str, Any]) -> tuple[int, Words]:
        """The number of the models' tensors, and words of those that are trained, of 256 at most: the same ones, at the
        same places, in each call.
        """
        self._look(state, 1)
        return len(self._models.keys), self._models.words(0, trained=True, most=_COMPARED)

    def _places(self, step: int) -> int | None:
        if not self._loaders or step % self._loaders_every:
            return None
        began = time.perf_counter()
        word = word_of([each.state_dict() for each in self._loaders])
        took = time.perf_counter() - began
        every = next(each for least, each in _SLOW if took >= least)
        if (
            self._has_asked and every > self._loaders_every
        ):  # the first call may take longer than others
            self._loaders_every = every
            text = (
                "the journal has the state of the data loaders at every %dth step: it takes %.1f ms"
            )
            logger.info(text, every, took * 1000)
        self._has_asked = True
        return word

    def _look(self, state: Mapping[str, Any], step: int) -> None:
        given = [_unwrapped(each) for each in state.values() if type(each) not in _VALUES]
        known = list(map(id, known_optimizers()))
        same = _same(given, self._given) and known == self._known and step % _LOOK_AGAIN
        if not same or self._now() != self._entries:
            self.forget()
            self._given, self._known = given, known
            self._look_through(TrainingState(state, self._rank_set))
            self._entries = self._now()

    def _now(self) -> list[int]:
        """What an optimizer's state consists of, whose dicts are held: so no other has the same id."""
        return [entry for each in self.optimizers for entry in map(id, each.state.values())]

    def _look_through(self, found: TrainingState) -> None:
        seen: dict[int, str] = {}
        optimizers: list[Optimizer] = []
        for name, part in found.parts.items():
            if isinstance(part, OptimizerPart):
                optimizers.append(part.optimizer)
            if not isinstance(part, ModelPart):
                continue
            self.models.append(name)
            for prefix, module in (
                each for whole in part.modules for each in whole.named_modules()
            ):
                for key, tensor in module._parameters.items():
                    if tensor is not None and id(tensor) not in seen:
                        seen[id(tensor)] = ".".join(filter(None, (prefix, key)))
                        self._models.add(module._parameters, key, seen[id(tensor)])
        for each in known_optimizers():
            if each not in optimizers and not seen.keys().isdisjoint(map(id, _parameters(each))):
                optimizers.append(each)
        self._optimizers = list(map(ref, optimizers))
        for each in optimizers:
            for parameter in _parameters(each):
                entry = each.state.get(parameter)
                moments = entry if type(entry) is dict else {}
                for key in sorted(moments):
                    if isinstance(moments[key], torch.Tensor):
                        name = f"{key} of {seen.get(id(parameter), 'a parameter')}"
                        self._moments.add(moments, key, name)
        differing = found.per_rank()
        self._loaders = [each for each in differing if not isinstance(each, RngState)]
        self.has_generators = len(self._loaders) < len(differing)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _unwrapped(value: Any) -> Any:
    """What is the same object at each step: a program may make a new wrapper for each."""
    if isinstance(value, PerRank):
        return value.wrapped
    return value.model if isinstance(value, Trainable) else value


def _same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _generators(step: int) -> Callable[[], int]:
    """The states of the random generators as they are now, of which the result makes a digest."""
    _, words, gauss = random.getstate()
    numpy = None if step % _NUMPY_EVERY else sys.modules.get("numpy")
    _, keys, *rest = ("", b"") if numpy is None else numpy.random.get_state()
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())  # a seed and a position, which the host has

    def digest() -> int:
        data = _PYTHON.pack(*words), repr((gauss, rest)).encode(), keys
        return digest_of(*data, *(each.numpy() for each in states))

    return digest


def digest_of(*data: Any) -> int:
    """A number of 32 bits for buffers of bytes."""
    digest = 0
    for each in data:
        digest = crc32c(each, digest)
    return digest
