"""Ways to step an optimizer on a fake device, each with a save in flight: backward is torch's, steps are kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.devices.fake_cuda import CACHE, FakeCuda, Stepper, differing, model, save
from support.tiers import sampled, tries
from torch.utils.checkpoint import checkpoint

Named = dict[str, torch.Tensor]


def backward(named: Named) -> None:
    sum(parameter.sum() for parameter in named.values()).backward()  # type: ignore[union-attr]


def in_backward(cuda: FakeCuda, named: Named) -> tuple[list[Stepper], Callable[[], None]]:
    """An optimizer for each parameter, which steps as soon as there is a gradient."""
    steppers = [Stepper(cuda, {name: parameter}) for name, parameter in named.items()]
    for stepper, parameter in zip(steppers, named.values(), strict=True):
        parameter.register_post_accumulate_grad_hook(lambda _, own=stepper: own.step())
    return steppers, lambda: backward(named)


def accumulating(cuda: FakeCuda, named: Named) -> tuple[list[Stepper], Callable[[], None]]:
    """Two backward passes before each step."""
    stepper = Stepper(cuda, named)

    def iterate() -> None:
        backward(named)
        backward(named)
        stepper.step()

    return [stepper], iterate


def recomputing(cuda: FakeCuda, named: Named) -> tuple[list[Stepper], Callable[[], None]]:
    """Activation checkpointing: forward runs again within backward."""
    stepper = Stepper(cuda, named)

    def iterate() -> None:
        x = torch.ones(1, requires_grad=True)
        for parameter in named.values():
            x = checkpoint(lambda x, p=parameter: x + p.sum(), x, use_reentrant=False)
        x.sum().backward()
        stepper.step()

    return [stepper], iterate


def several(cuda: FakeCuda, named: Named) -> tuple[list[Stepper], Callable[[], None]]:
    """Two optimizers, on streams of their own."""
    names = list(named)
    halves = [{name: named[name] for name in names[part::2]} for part in range(2)]
    steppers = [Stepper(cuda, half) for half in halves]
    streams = [cuda.main_stream(0), cuda.new_stream()]

    def iterate() -> None:
        backward(named)
        cuda.synchronize()
        for stepper, stream in zip(steppers, streams, strict=True):
            with cuda.current(stream):
                stepper.step()

    return steppers, iterate


@pytest.mark.parametrize("saves", tries(2, 6))
@pytest.mark.parametrize(
    ("way", "window"),
    sampled(
        itertools.product(
            [in_backward, accumulating, recomputing, several], ["backward", "immediate"]
        ),
        keep=[
            *((in_backward, "immediate"), (accumulating, "backward")),
            *((recomputing, "backward"), (several, "immediate")),
        ],
    ),
)
def test_each_save_is_the_state_at_its_call(
    cuda: FakeCuda, tmp_path: Path, way: Callable, window: str, saves: int
) -> None:
    named = model(4)
    steppers, iterate = way(cuda, named)
    cuda.await_pinned(CACHE)
    for index in range(saves):
        cuda.configure(seed=index + 1, max_delay_us=5000, piece=16384)
        expected = {name: value for stepper in steppers for name, value in stepper.now().items()}
        if way is several:
            cuda.synchronize()  # the caller's stream is one of theirs
        future = save(tmp_path / f"{index}", named, reads=window)
        iterate()
        iterate()
        future.result()
        assert differing(tmp_path / f"{index}", expected) == []
    assert cuda.count("violations") == 0
