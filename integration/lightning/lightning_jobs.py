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
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, WeightAveraging
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from support.waiting import await_that
from torch.distributed.fsdp import fully_shard, fully_sharded_data_parallel
from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import dcp_datastates as ds
from dcp_datastates.lightning import (
    DataStatesDDPStrategy,
    DataStatesFSDPStrategy,
    DataStatesModelCheckpoint,
    DataStatesModelParallelStrategy,
    DataStatesSingleDeviceStrategy,
)

WIDTH = 256
BATCHES = 4  # of an epoch
ROWS = 4  # of a batch


class Batches:
    """A resumable loader of random batches, shuffled anew for each epoch, on each rank in its own way."""

    def __init__(self) -> None:
        self.position = 0
        self.seed = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[torch.Tensor]:
        drawn = int(torch.randint(1 << 30, ()))  # by every iterator, like that of a DataLoader
        if self.position % BATCHES == 0:
            self.position, self.seed = 0, drawn
        while self.position < BATCHES:
            self.position += 1
            data = torch.Generator().manual_seed(self.seed + self.position)
            yield torch.randn(ROWS, WIDTH, generator=data)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.seed = state["position"], state["seed"]


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
            attached = self._trainer is not None
            if attached and isinstance(self.trainer.strategy, ModelParallelStrategy):
                for layer in self.layers:
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
                fully_shard(self, mesh=self.device_mesh["data_parallel"])
            torch.manual_seed(100 + self.global_rank)

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
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Kill(Checkpoint):
    """Kills the rank after ``step``, once the directory ``begun`` has ``attempts`` saves and ``committed`` is.

    It is a ``Checkpoint`` because Lightning calls these last, in their order.
    """

    def __init__(
        self, root: Path, step: int, begun: str, attempts: int = 1, committed: str | None = None
    ) -> None:
        self._step = step
        self._begun = root / begun
        self._attempts = attempts
        self._committed = None if committed is None else root / committed / ".metadata"

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != self._step:
            return
        await_that(lambda: len(list(self._begun.glob("[!.]*/"))) >= self._attempts)
        if self._committed is not None:
            await_that(self._committed.exists)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def use_cpu_for_fsdp1() -> None:
    """FSDP1 refuses to work without an accelerator unless it is given a device, and Lightning gives it none on a CPU.

    Apart from that, it works on a CPU.
    """

    def handle(state: Any, *_: Any) -> Any:
        state._device_handle = _FSDPDeviceHandle.from_device(torch.device("cpu"))
        return state

    fully_sharded_data_parallel._init_device_handle = handle


def strategy_of(kind: str, options: dict[str, Any]) -> Any:
    use_cpu_for_fsdp1()
    if kind == "fsdp1":
        return DataStatesFSDPStrategy(auto_wrap_policy={torch.nn.Linear}, **options)
    if kind == "ddp":
        return DataStatesDDPStrategy(**options)
    if kind == "single":
        return DataStatesSingleDeviceStrategy(**options)
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
        devices=dist.get_world_size() if dist.is_initialized() else 1,
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
    kill: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    average: bool = False,
    **saving: Any,
) -> dict[str, Any]:
    """Train and return what the model noted; ``kill`` is for :class:`Kill`, ``saving`` for the callback."""
    root = Path(folder)
    saves = DataStatesModelCheckpoint(
        dirpath=root, filename="{step}", every_n_train_steps=every, **{"save_top_k": -1, **saving}
    )
    callbacks: list[Any] = [saves, *([Kill(root, **kill)] if kill else [])]
    if average:
        callbacks.insert(0, WeightAveraging())
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
        "weights": [float(each.detach().sum()).hex() for each in model.parameters()],
    }


def save_stock(folder: str, kind: str) -> dict[str, Any]:
    """Three steps with Lightning's own strategy, and its checkpoint; then two more."""
    saves = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = trainer_of(Path(folder), kind, 5, {}, [saves])
    model = Tiny(dropout=0.0)
    trainer.fit(model, Batches())
    return {"losses": model.losses}


def resume_from(folder: str, path: str, kind: str = "fsdp2") -> dict[str, Any]:
    """The steps from a checkpoint to the fifth, without dropout and without saves."""
    trainer = trainer_of(Path(folder), kind, 5, {}, [ModelCheckpoint(save_top_k=0), Compare(path)])
    model = Tiny(dropout=0.0)
    trainer.fit(model, Batches(), ckpt_path=path)
    return {"losses": model.losses, "same": trainer.callbacks[0].same}


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


class Compare(pl.Callback):
    """Compares what was loaded with what :func:`dcp_datastates.load` reads."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.same: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        try:
            stored = ds.load(self._path)
        except ds.errors.ForeignCheckpointError:
            return
        moments = trainer.optimizers[0].state
        for name, parameter in module.named_parameters():
            found = stored["optimizer_0"]["state"][name]
            assert torch.equal(full(parameter), stored["state_dict"][name])
            assert torch.equal(full(moments[parameter]["exp_avg"]), found["exp_avg"])
            self.same.append(name)


def in_stores(folder: str, root: str) -> dict[str, Any]:
    """Train with checkpoints in memory, which fsspec has without another library; go on from one there, and from one
    at ``root``.
    """
    os.chdir(folder)

    def run(steps: int, path: str | None = None) -> tuple[Tiny, pl.Trainer]:
        saves = DataStatesModelCheckpoint(
            dirpath="memory://run",
            filename="{step}",
            monitor="step",
            mode="max",
            every_n_train_steps=2,
            save_top_k=2,
        )
        trainer = trainer_of(Path(folder, "local"), "single", steps, {}, [saves])
        model = Tiny()
        trainer.fit(model, Batches(), ckpt_path=path)
        return model, trainer

    whole, trainer = run(7)
    trainer.save_checkpoint(f"{root}/step-7")
    names = [each.name for each in ds.inspect("memory://run").checkpoints]
    newest = str(ds.latest("memory://run"))
    resumed, _ = run(7, "memory://run/step=4.ckpt")
    further, _ = run(8, f"{root}/step-7")
    last = ""
    try:
        run(8, "last")
    except ds.errors.ConfigurationError as error:
        last = str(error)
    return {
        "losses": [whole.losses, resumed.losses, further.losses],
        "names": names,
        "newest": newest,
        "last": last,
        "local": [path.name for path in Path(folder).rglob("*")],
    }
