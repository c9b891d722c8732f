"""Training jobs with the real Lightning, as the ranks run them."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from support.waiting import await_that
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

import dcp_datastates as ds
from dcp_datastates.lightning import (
    DataStatesFSDPStrategy,
    DataStatesModelCheckpoint,
    DataStatesModelParallelStrategy,
)

WIDTH = 256
BATCHES = 4  # of an epoch
ROWS = 12  # of a batch, of all ranks


class Batches:
    """A resumable loader of random batches. Each rank has its part of a batch that depends on its number only."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < BATCHES:
            self.position += 1
            data = torch.Generator().manual_seed(self.position)
            yield torch.randn(ROWS, WIDTH, generator=data).chunk(dist.get_world_size())[dist.get_rank()]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Tiny(pl.LightningModule):
    """Two layers with dropout. Notes its losses, and the order of backward passes and optimizer steps."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.losses: dict[int, str] = {}
        self.events: list[str] = []
        self.layers: torch.nn.ModuleList | None = None
        self.dropout = torch.nn.Dropout(dropout)

    def configure_model(self) -> None:
        if self.layers is None:
            torch.manual_seed(1)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
            if isinstance(self.trainer.strategy, ModelParallelStrategy):
                for layer in self.layers:
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
                fully_shard(self, mesh=self.device_mesh["data_parallel"])
            torch.manual_seed(100 + dist.get_rank())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = batch
        for layer in self.layers:
            hidden = self.dropout(torch.relu(layer(hidden)))
        loss = (hidden - batch).square().mean()
        self.losses[self.trainer.global_step + 1] = float(loss.detach()).hex()
        return loss

    def on_after_backward(self) -> None:
        self.events.append("backward")

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Kill(Checkpoint):
    """Kills the rank with a save in flight that cannot be committed, once an earlier one is committed.

    It is a ``Checkpoint`` because Lightning calls these last, in their order.
    """

    def __init__(self, step: int, in_flight: Path, committed: Path | None) -> None:
        self._step = step
        self._in_flight = in_flight
        self._committed = committed

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != self._step:
            return
        await_that(self._in_flight.is_dir)
        if self._committed is not None:
            await_that((self._committed / ".metadata").exists)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def strategy_of(kind: str, options: dict[str, Any]) -> Any:
    if kind == "fsdp1":
        return DataStatesFSDPStrategy(auto_wrap_policy={torch.nn.Linear}, **options)
    if kind == "stock-fsdp1":
        return FSDPStrategy(auto_wrap_policy={torch.nn.Linear}, state_dict_type="sharded")
    made = ModelParallelStrategy if kind == "stock" else DataStatesModelParallelStrategy
    return made(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1, **options)


def trainer_of(
    folder: Path, kind: str, steps: int, options: dict[str, Any], callbacks: list[Any]
) -> pl.Trainer:
    warnings.simplefilter("ignore")
    return pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy_of(kind, options),
        max_steps=steps,
        max_epochs=-1,
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def train(
    folder: str,
    *,
    kind: str = "fsdp2",
    steps: int = 7,
    every: int = 2,
    resume: str | None = None,
    kill_after: int | None = None,
    waits_for: int | None = None,
    options: dict[str, Any] | None = None,
    **saving: Any,
) -> dict[str, Any]:
    """Train and return what the model noted; ``saving`` is for the callback."""
    root = Path(folder)
    saves = DataStatesModelCheckpoint(
        dirpath=root, filename="{step}", every_n_train_steps=every, **{"save_top_k": -1, **saving}
    )
    callbacks: list[Any] = [saves]
    if kill_after is not None:
        before = None if waits_for is None else root / f"step={waits_for}.ckpt"
        callbacks.append(Kill(kill_after, root / f"step={kill_after}.ckpt", before))
    trainer = trainer_of(root, kind, steps, options or {}, callbacks)
    model = Tiny()
    path: Any = ds.latest(root) if resume == "newest" else resume
    hook = register_optimizer_step_pre_hook(lambda *_: model.events.append("step"))
    try:
        trainer.fit(model, Batches(), ckpt_path=path)
    finally:
        hook.remove()
    return {
        "losses": model.losses,
        "events": model.events,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "path": str(path),
        "best": saves.best_model_path,
    }


def save_stock(folder: str, kind: str) -> dict[str, Any]:
    """Three steps with Lightning's own strategy, and its checkpoint; then two more."""
    saves = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = trainer_of(Path(folder), kind, 5, {}, [saves])
    model = Tiny(dropout=0.0)
    trainer.fit(model, Batches())
    return {"losses": model.losses}


def resume_from(folder: str, path: str, kind: str) -> dict[str, Any]:
    """The steps from a checkpoint to the fifth, without dropout and without saves."""
    trainer = trainer_of(Path(folder), kind, 5, {}, [ModelCheckpoint(save_top_k=0)])
    model = Tiny(dropout=0.0)
    trainer.fit(model, Batches(), ckpt_path=path)
    return {"losses": model.losses}
