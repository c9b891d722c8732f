"""The job that is saved: a small decoder-only, byte-level transformer, spread over a device mesh."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

CONTEXT, WIDTH, HEADS, LAYERS = 128, 384, 6, 4
BATCH, SEED = 8, 2024


class Transformer(nn.Module):
    """Bytes in (batch, CONTEXT), logits of the next byte out (batch, CONTEXT, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True, bias=False
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions(torch.arange(CONTEXT))
        causal = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        for layer in self.layers:
            x = layer(x, src_mask=causal, is_causal=True)
        return self.head(self.norm(x))


class Job:
    """Model, optimizer, schedule and data; with FSDP2 over ``dp``, and tensor parallelism over ``tp``."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(SEED)
        self.model = Transformer()
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        for layer in self.model.layers:
            if "tp" in (mesh.mesh_dim_names or ()):
                plan = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
                parallelize_module(layer, mesh["tp"], plan)
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(self.model, mesh=mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.2, total_iters=5)
        self._text = torch.frombuffer(bytearray(Path(F.__file__).read_bytes()), dtype=torch.uint8)
        self._mesh = mesh["dp"]  # the ranks that have data of their own

    def step(self, iteration: int) -> float:
        """The loss over the global batch, which depends on the iteration alone, whatever the number of ranks."""
        generator = torch.Generator().manual_seed(SEED + iteration)
        last = len(self._text) - CONTEXT - 1
        starts = torch.randint(last, (BATCH,), generator=generator)
        mine = starts[self._mesh.get_local_rank() :: self._mesh.size()].tolist()
        windows = torch.stack([self._text[at : at + CONTEXT + 1] for at in mine]).long()
        inputs, targets = windows[:, :-1], windows[:, 1:]
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        average = loss.detach() / self._mesh.size()
        dist.all_reduce(average, group=self._mesh.get_group())
        return average.item()
