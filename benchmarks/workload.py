"""A training state of a given size on one rank, with an iteration that uses all of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_WIDTH = 4096
_MATRIX_BYTES = 4 * _WIDTH * _WIDTH
_SMALL_PARAMETERS = 334
_BATCH = 16


class Model(nn.Module):
    """Large matrices (64 MiB), and 334 vectors (16 KiB), which AdamW triples to 1,000 small tensors."""

    def __init__(self, state_bytes: int) -> None:
        super().__init__()
        small = 3 * 4 * _WIDTH * _SMALL_PARAMETERS
        count = max(1, round((state_bytes - small) / (3 * _MATRIX_BYTES)))
        self.matrices = nn.ParameterList(
            torch.empty(_WIDTH, _WIDTH).uniform_(-0.02, 0.02) for _ in range(count)
        )
        self.scales = nn.ParameterList(torch.ones(_WIDTH) for _ in range(_SMALL_PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = x + torch.tanh(x @ matrix)
        for scale in self.scales:
            x = x * scale
        return x


class Workload:
    """The model, its AdamW, and one iteration in the pieces that a benchmark times."""

    def __init__(self, state_bytes: int) -> None:
        torch.manual_seed(0)
        self.model = Model(state_bytes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self._input = torch.randn(_BATCH, _WIDTH)
        self.forward_backward()
        self.optimizer.step()

    def forward_backward(self) -> None:
        """Leaves fresh gradients."""
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self._input).square().mean().backward()

    def state_dict(self) -> dict[str, Any]:
        """The live tensors, by name; what :func:`torch.distributed.checkpoint.async_save` is given."""
        optimizer = {
            name: dict(self.optimizer.state[parameter])
            for name, parameter in self.model.named_parameters()
        }
        return {"model": dict(self.model.state_dict()), "optimizer": optimizer}

    @property
    def nbytes(self) -> int:
        """Of all tensors of the state."""
        parameters = list(self.model.parameters())
        states = [t for state in self.optimizer.state.values() for t in state.values()]
        return sum(t.numel() * t.element_size() for t in [*parameters, *states])
