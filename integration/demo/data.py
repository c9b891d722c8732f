"""Training text that every machine has: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

_CORPUS_BYTES = 2 << 20


def standard_library() -> Tensor:
    """The first 2 MiB of the standard library's modules, in the order of their names (uint8)."""
    text = bytearray()
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += source.read_bytes()
        if len(text) >= _CORPUS_BYTES:
            break
    return torch.frombuffer(text[:_CORPUS_BYTES], dtype=torch.uint8)


class Position(TypedDict):
    """Where the data stand: all that a resumed job needs to go on with the very next batch."""

    seed: int
    batches_drawn: int


class Batches:
    """Global batches of windows into ``text``; each data-parallel rank takes its share of each.

    The batch is drawn from ``(seed, batches_drawn)`` alone, so it is the same on any number of ranks.
    """

    def __init__(self, text: Tensor, *, batch: int, context: int, seed: int) -> None:
        self._text = text
        self._batch = batch
        self._context = context
        self._position = Position(seed=seed, batches_drawn=0)

    def draw(self, rank: int, world: int) -> tuple[Tensor, Tensor]:
        """The next batch's share of data-parallel ``rank``: (inputs, targets), (batch / world, context)."""
        position = self._position
        generator = torch.Generator().manual_seed(
            position["seed"] * 1_000_003 + position["batches_drawn"]
        )
        position["batches_drawn"] += 1
        last = len(self._text) - self._context - 1
        starts = torch.randint(last, (self._batch,), generator=generator)
        windows = torch.stack(
            [
                self._text[start : start + self._context + 1]
                for start in starts[rank::world].tolist()
            ]
        ).long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> Position:
        return Position(**self._position)

    def load_state_dict(self, position: Position) -> None:
        self._position = Position(**position)
