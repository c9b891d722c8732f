"""Finds that what is saved stays the same while an optimizer steps: a program that saves a frozen copy of its model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dcp_datastates.io.gradient_hooks import untraced
from dcp_datastates.manager.state_samples import StateSamples, Words

logger = logging.getLogger(__name__)

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
        optimizers = self._samples.optimizers or list(_steps)
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
