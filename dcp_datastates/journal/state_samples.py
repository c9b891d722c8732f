"""Digests of what a loop's state holds: words of its tensors, its random generators, the places of its loaders.

The words lie where the number of the step says: a run that repeats a step exactly has the same digests. At each save,
the words of the trainable tensors are compared with those at the save before (:class:`Stale`).
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
from itertools import chain, compress, count
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dcp_datastates._native import crc32c, sample_words
from dcp_datastates.io.gradient_hooks import untraced
from dcp_datastates.io.tensor_memory import PLAIN_TYPES, is_unusual, local_tensor, local_tensors
from dcp_datastates.planning.samples import word_of
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.staging.ownership import known_optimizers
from dcp_datastates.training.live_optimizer import parameters_in
from dcp_datastates.training.models import ModelPart, Trainable
from dcp_datastates.training.optimizers import OptimizerPart
from dcp_datastates.training.per_rank import PerRank, RngState
from dcp_datastates.training.training_state import TrainingState

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
_IS_CPU, _NBYTES = map(operator.attrgetter, ("is_cpu", "nbytes"))

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


class _Tensors:
    """Tensors by name, each in a dict under a key: a program may put another tensor there."""

    def __init__(self) -> None:
        self._places: list[tuple[Any, Any, str]] = []
        self._on_host = True
        self._pointers: dict[tuple[int, int], list[int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, inside: Any, key: Any, name: str) -> None:
        local = local_tensor(inside[key])
        if not is_unusual(local) and _is_whole(local):
            self._places.append((inside, key, name))
            self._on_host = self._on_host and _IS_CPU(local)

    def _turn(self, step: int, most: int | None = None) -> slice:
        """Those that are sampled at this step."""
        most = most or (ON_HOST if self._on_host else _ON_DEVICE)
        turns = max(1, -(-len(self._places) // most))
        return slice(step % turns, None, turns)

    def names(self, step: int) -> list[str]:
        """The names of those whose turn is ``step``, in the order of their words; none if some are on a device."""
        return [name for _, _, name in self._places[self._turn(step)]] if self._on_host else []

    def words(self, step: int, trained: bool, most: int | None = None) -> Words:
        """Words of those whose turn is ``step``; with ``trained``, of those that require a gradient."""
        turn = self._turn(step, most)
        found = [inside[key] for inside, key, _ in self._places[turn]]
        needed = [not trained or each.requires_grad for each in found]
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
        self._seen: list[int] = []
        self._models, self._moments = _Tensors(), _Tensors()
        self._loaders: list[Any] = []
        self.optimizers: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()
        """Those of the state, and others that train its models."""
        self.models: list[str] = []
        """The names of the models."""
        self.has_generators = False
        """Whether the state has a :class:`RngState`."""

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
        names = self._models.names(step), self._moments.names(step)
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
        return len(self._models), self._models.words(0, trained=True, most=_COMPARED)

    def _places(self, step: int) -> int | None:
        """A digest of the states of the loaders, if they are asked at this step."""
        if not self._loaders or step % self._loaders_every:
            return None
        began = time.perf_counter()
        word = word_of([each.state_dict() for each in self._loaders])
        took = time.perf_counter() - began
        every = next(each for least, each in _SLOW if took >= least)
        # The first call may take longer than others.
        if self._has_asked and every > self._loaders_every:
            self._loaders_every = every
            text = (
                "the journal has the state of the data loaders at every %dth step: it takes %.1f ms"
            )
            logger.info(text, every, took * 1000)
        self._has_asked = True
        return word

    def _look(self, state: Mapping[str, Any], step: int) -> None:
        given = [_unwrapped(each) for each in state.values() if type(each) not in _VALUES]
        if step % _LOOK_AGAIN == 0 or self._seen != self._ids(given):
            self.forget()
            self._given = given  # held, so that no other object has the same id
            self._look_through(TrainingState(state, self._rank_set))
            self._seen = self._ids(given)

    def _ids(self, given: list[Any]) -> list[int]:
        """Of all that the samples depend on. The dicts of the optimizers' states are held, if they have tensors."""
        states = (each.state.values() for each in self.optimizers)
        return list(map(id, chain(given, known_optimizers(), *states)))

    def _look_through(self, found: TrainingState) -> None:
        names: dict[int, str] = {}
        for name, part in found.parts.items():
            if isinstance(part, OptimizerPart):
                self.optimizers[part.optimizer] = None
            if not isinstance(part, ModelPart):
                continue
            self.models.append(name)
            modules = chain.from_iterable(whole.named_modules() for whole in part.modules)
            for prefix, module in modules:
                for key, tensor in module._parameters.items():
                    if tensor is not None and id(tensor) not in names:
                        names[id(tensor)] = ".".join(filter(None, (prefix, key)))
                        self._models.add(module._parameters, key, names[id(tensor)])
        for each in known_optimizers():
            if not names.keys().isdisjoint(map(id, parameters_in(each))):
                self.optimizers.setdefault(each)
        for each in self.optimizers:
            for parameter in parameters_in(each):
                entry = each.state.get(parameter)
                moments = entry if type(entry) is dict else {}
                for key in sorted(moments):
                    if isinstance(moments[key], torch.Tensor):
                        of = names.get(id(parameter), "a parameter")
                        self._moments.add(moments, key, f"{key} of {of}")
        differing = found.per_rank()
        self._loaders = [each for each in differing if not isinstance(each, RngState)]
        self.has_generators = len(self._loaders) < len(differing)


def _unwrapped(value: Any) -> Any:
    """What is the same object at each step: a program may make a new wrapper for each."""
    if isinstance(value, PerRank):
        return value.wrapped
    return value.model if isinstance(value, Trainable) else value


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


# ---- what is saved stays the same while an optimizer steps: a frozen copy of the model ------------------


_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""When each optimizer made its latest step with a learning rate that is not 0, by the ``_clock``."""
_clock = count(1)


@untraced
def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    rates = (group.get("lr") for group in optimizer.param_groups)
    if any(
        not isinstance(each, (int, float)) or each for each in rates
    ):  # a tensor's value is not asked for
        _steps[optimizer] = next(_clock)


register_optimizer_step_post_hook(_stepped)


class Stale:
    """Compares the trainable tensors at each save with those at the save before it."""

    def __init__(self, samples: StateSamples) -> None:
        self._samples = samples
        self.before: tuple[int, int, int, Words] | None = None
        """Of the save before: its step, its time by the ``_clock``, the number of tensors, and words of them."""

    def saving(
        self, step: int, state: Mapping[str, Any], post: Callable[[Callable[[], object]], object]
    ) -> None:
        """``state`` is about to be saved. ``post`` runs a function in the background: words may be on a device."""
        tensors, words = self._samples.trained(state)
        optimizers = list(self._samples.optimizers) or list(_steps)
        stepped = max((_steps.get(each, 0) for each in optimizers), default=0)
        before, self.before = self.before, (step, next(_clock), tensors, words)
        if before is not None and before[1] < stepped and before[2] == tensors:
            models = ", ".join(map(repr, self._samples.models))
            post(lambda: _compare(before[3], words, (before[0], step, models)))


def _compare(before: Words, now: Words, about: tuple[int, int, str]) -> None:
    found = now()
    if any(found) and list(found) == list(before()):
        text = (
            "the saves of steps %d and %d have the same values of all trainable tensors of %s, by samples, though an "
            "optimizer has stepped in between: what is saved is not what is trained. Usually the state has a copy of "
            "the model (copy.deepcopy); pass the model itself. (Or the learning rate is too small to change anything)"
        )
        logger.warning(text, *about)
