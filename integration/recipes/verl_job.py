"""What a rank of verl's FSDP engine does with its checkpoint manager, on a CPU."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM


def train(folder: str, kind: str, *, first: int, last: int, save: int | None) -> dict[int, str]:
    """Take the steps ``first`` to ``last``; save after the step ``save``. Before the first one, load what was saved
    after the step before it.

    Returns the losses, exact, by step.
    """
    warnings.simplefilter("ignore")
    from verl.workers.engine.fsdp.transformer_impl import FSDPCheckpointManager

    assert FSDPCheckpointManager.__module__ == "verl_datastates"
    model, optimizer, scheduler = _trained(kind)
    manager = FSDPCheckpointManager(model, optimizer, scheduler)
    torch.manual_seed(dist.get_rank())
    if first > 1:
        manager.load_checkpoint(str(_path(folder, first - 1)))
    losses = {}
    for step in range(first, last + 1):
        tokens = torch.randint(64, (2, 8))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses[step] = loss.item().hex()
        if step == save:
            manager.save_checkpoint(str(_path(folder, step)), global_step=step, max_ckpt_to_keep=1)
    return losses


def _path(folder: str, step: int) -> Path:
    """As verl's trainers name it."""
    return Path(folder, f"global_step_{step}", "actor")


def _trained(kind: str) -> tuple[Any, torch.optim.Optimizer, Any]:
    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            attention_dropout=0.1,
        )
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "fsdp":
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(model, device_mesh=mesh, device_id=cpu)
    else:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
