"""A tiny model, trained by DeepSpeed: the same losses in every run with the same number of ranks."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule
from deepspeed.utils import logger

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH = 16
"""Of all ranks together."""
WIDE = 320
"""Times that the batch norm gets the inputs: its buffers are so large that they could be deferred."""
STEPS, SAVED_AFTER = 6, 3
STAGES = (0, 1, 2, 3)
BF16_STAGE = 2

logger.setLevel(logging.WARNING)
torch.set_num_threads(1)
# DeepSpeed would compile an operator for sums in shared memory; gloo sums as well.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Model(torch.nn.Module):
    """Large enough weights to be deferred, batch norm's buffers, and a tied weight.

    All sizes are even: ZeRO-3's padding is memory that is not initialized, which no two runs have in common.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 512)
        self.norm = torch.nn.BatchNorm1d(64 * WIDE, affine=False)
        self.second = torch.nn.Linear(512, 256)
        self.tied = torch.nn.Linear(512, 256)
        self.tied.weight = self.second.weight
        self.last = torch.nn.Linear(256, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        with (
            torch.no_grad()
        ):  # only for the buffers: the loss must not depend on how many ranks share the batch
            self.norm(inputs.repeat(1, WIDE).to(self.norm.running_mean.dtype))
        return self.last(torch.relu(self.second(hidden) + self.tied(hidden)))


class Changed(Model):
    """Has a layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.added = torch.nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.added(super().forward(inputs))


class Grouped(Model):
    """Trains its weights and its biases in groups of their own."""

    def groups(self) -> list[dict[str, Any]]:
        named = list(self.named_parameters())
        kinds = [[each for name, each in named if name.endswith(end)] for end in ("weight", "bias")]
        return [{"params": each} for each in kinds]


def engine(stage: int, datastates: object = None, model: type[Model] = Model, **more: Any) -> Any:
    """A new engine; with ``datastates``, the value of ``datastates_ckpt``, for this package."""
    torch.manual_seed(0)
    return _initialized(model(), stage, datastates, **more)


def engine_of_file(configuration: Path) -> Any:
    """A new engine with the configuration of a file, as the command line of a program has it."""
    torch.manual_seed(0)
    model = Model()
    made, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=str(configuration)
    )
    return made


def pipeline(datastates: object = None) -> Any:
    """A new engine with a pipeline stage on each rank, and ZeRO-1."""
    torch.manual_seed(0)
    sizes = (64, 512, 256, 512, 2)
    layers = [torch.nn.Linear(*each) for each in itertools.pairwise(sizes)]
    model = PipelineModule(layers, WORLD, loss_fn=F.mse_loss, partition_method="uniform")
    return _initialized(model, 1, datastates, gradient_accumulation_steps=2)


def micro_batches(step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The data of one step of a pipeline."""
    data = torch.Generator().manual_seed(step)
    while True:
        yield (
            torch.randn(BATCH // WORLD, 64, generator=data),
            torch.randn(BATCH // WORLD, 2, generator=data),
        )


def _initialized(model: torch.nn.Module, stage: int, datastates: object, **more: Any) -> Any:
    configuration: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH // WORLD,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1_000_000,
        **more,
    }
    if stage == BF16_STAGE:
        configuration["bf16"] = {"enabled": True}
    if datastates is not None:
        configuration["datastates_ckpt"] = datastates
    parameters = model.groups() if isinstance(model, Grouped) else model.parameters()
    made, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=configuration)
    return made


def train(training: Any, step: int) -> float:
    """One step on this rank's part of the batch; returns its loss."""
    data = torch.Generator().manual_seed(step)
    inputs, wanted = torch.randn(BATCH, 64, generator=data), torch.randn(BATCH, 2, generator=data)
    share = slice(RANK * BATCH // WORLD, (RANK + 1) * BATCH // WORLD)
    dtype = torch.bfloat16 if training.bfloat16_enabled() else torch.float32
    loss = F.mse_loss(training(inputs[share].to(dtype)).float(), wanted[share])
    training.backward(loss)
    training.step()
    return float(loss)


def client_state(step: int) -> dict[str, Any]:
    """What a user may add: keys that are ints, tuples, objects."""
    return {"step": step, "mine": {1: (torch.arange(3), "text"), (2, 3): {4}}}


def latest(directory: Path) -> str | None:
    """What the file ``latest`` names; None if there is none."""
    try:
        return (directory / "latest").read_text()
    except FileNotFoundError:
        return None
