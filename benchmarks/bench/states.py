"""The states that are saved and loaded, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

CASES = {
    "large": "large tensors",
    "llm": "an LLM with AdamW's moments",
    "many64k": "many tensors of 64 KiB",
    "many4k": "many tensors of 4 KiB",
}


@dataclass
class State:
    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: each.detach() for name, each in self.parameters.items()}

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.parameters.values())


def make(case: str, scale: float) -> State:
    """``scale`` 1 is 1 GiB in tensors of 32 MiB, 0.7 GB of 14 layers, or 10,000 small tensors."""
    torch.manual_seed(0)
    parameters = {
        name: torch.nn.Parameter(torch.empty(shape).uniform_())
        for name, shape in _shapes(case, scale)
    }
    optimizer = torch.optim.SGD(parameters.values(), lr=0.0)
    optimizer.step()  # ours defers tensors that an optimizer owns, and waits in its steps
    return State(parameters, optimizer)


def _shapes(case: str, scale: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    if case == "large":
        yield from ((f"weight{n}", (2048, 4096)) for n in range(max(1, round(32 * scale))))
    elif case == "llm":
        width = 768 if scale > 0.05 else 192
        for moment in ("weight", "gradient", "first", "second"):
            yield f"{moment}.embedding", (round(32000 * min(1, 2 * scale)), width)
            for layer in range(max(1, round(14 * scale))):
                for name in ("query", "key", "value", "output"):
                    yield f"{moment}.{layer}.{name}", (width, width)
                for name in ("gate", "up", "down"):
                    yield f"{moment}.{layer}.{name}", (8 * width // 3, width)
                yield from ((f"{moment}.{layer}.norm{n}", (width,)) for n in range(2))
    else:
        side = {"many64k": 128, "many4k": 32}[case]
        number = max(2, round(10_000 * scale))
        yield from ((f"layers.{n}.weight", (side, side)) for n in range(number))
