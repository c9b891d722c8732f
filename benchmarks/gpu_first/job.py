"""A transformer that trains with AdamW on one GPU, the same from one seed each time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import dcp_datastates

_SEED = 1234


@dataclass(frozen=True)
class Shape:
    """Of the model, and of what it is fed."""

    width: int = 2048
    layers: int = 20
    heads: int = 16
    vocabulary: int = 32000
    sequence: int = 1024
    batch: int = 8
    device: str = "cuda"


SMOKE = Shape(width=64, layers=2, heads=2, vocabulary=100, sequence=16, batch=2, device="cpu")


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(2))
        self.mix = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.wide = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.mix(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: torch.Tensor = x + self.narrow(functional.gelu(self.wide(self.norms[1](x))))
        return result


class Job:
    """A model, its AdamW, and one iteration after another; the same from one seed."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(_SEED)
        self.shape = shape
        with torch.device(shape.device):  # the host would take its time over a billion numbers
            self.model = nn.Sequential(
                nn.Embedding(shape.vocabulary, shape.width),
                *(Block(shape) for _ in range(shape.layers)),
                nn.Linear(shape.width, shape.vocabulary, bias=False),
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        dcp_datastates.track(self.optimizer)
        self.losses: list[torch.Tensor] = []
        self.number = 0

    def forward_backward(self) -> None:
        generator = torch.Generator().manual_seed(_SEED + self.number)
        self.number += 1
        size = (self.shape.batch, self.shape.sequence + 1)
        tokens = torch.randint(self.shape.vocabulary, size, generator=generator)
        tokens = tokens.to(self.shape.device)
        with torch.autocast(self.shape.device, torch.bfloat16):
            logits = self.model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        self.losses.append(loss.detach())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        slots = {names[p]: dict(s) for p, s in self.optimizer.state.items()}
        return {"model": self.model.state_dict(), "optimizer": slots, "step": self.number}

    @property
    def nbytes(self) -> int:
        """Of all tensors of the state."""
        slots = (t for s in self.optimizer.state.values() for t in s.values())
        return sum(t.nbytes for t in (*self.model.state_dict().values(), *slots))

    def synchronize(self) -> None:
        if self.shape.device == "cuda":
            torch.cuda.synchronize()
