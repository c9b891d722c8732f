"""Plans of jobs that do not run: what each rank of an FSDP job would send, made one rank after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_datastates.planning.messages import SHARD, Head, LocalPlan

_ROWS, _WIDTH = 8, 1024  # of one rank's shard


@dataclass(frozen=True)
class Job:
    """Every tensor is 2-d and sharded on dimension 0 over all ranks: a chunk per rank and tensor."""

    ranks: int
    tensors: int

    @property
    def chunks(self) -> int:
        return self.ranks * self.tensors

    @cached_property
    def names(self) -> tuple[str, ...]:
        parts = ("attn.qkv", "attn.out", "mlp.up", "mlp.gate", "mlp.down", "norm")
        return tuple(
            f"model.layers.{number // len(parts)}.{parts[number % len(parts)]}.weight"
            for number in range(self.tensors)
        )

    @cached_property
    def _head(self) -> Head:
        """What all ranks' plans share."""
        count = self.tensors
        return Head(
            names=self.names,
            kinds=np.full(count, SHARD),
            properties=np.zeros(count, dtype=np.int64),
            table=(TensorProperties(dtype=torch.bfloat16),),
            ndims=np.full(count, 2, dtype=np.int64),
            shapes=np.tile(np.array([_ROWS * self.ranks, _WIDTH]), count),
            mappings={name: ("model", name[len("model.") :]) for name in self.names},
        )

    def plan(self, rank: int) -> LocalPlan:
        places = (np.array([_ROWS * rank, 0]), np.array([_ROWS, _WIDTH]))
        return LocalPlan(self._head, *(np.tile(each, self.tensors) for each in places))

    def plans(self) -> Iterator[LocalPlan]:
        return map(self.plan, range(self.ranks))

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """As many plain tensors, for what a rank does by itself (a DTensor costs every planner more)."""
        tensor = torch.empty(_ROWS, _WIDTH, dtype=torch.bfloat16)
        return {"model": {name[len("model.") :]: tensor[:] for name in self.names}}
