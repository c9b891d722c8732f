"""What the processes of ``frameworks.py`` train: one model, under each framework, with its own saves or this package's.

Called as ``frameworks_jobs.py FRAMEWORK KIND FOLDER``; the kind is "stock" or "ours".
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

WIDTH = 1792
LAYERS = 4
BATCH = 256
CACHE = 512 << 20
"""``host_cache_size``, in bytes: it holds the state."""

Save = Callable[[int], Path]
"""Saves, under a number, and returns where."""


class Model(torch.nn.Module):
    """51 MB of parameters; with the moments of AdamW, 154 MB."""

    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(x) - x).square().mean()}


def rounds(save: Save, ours: bool) -> Iterator[None]:
    """The benchmark, seen from a training loop, which takes a step at each ``yield``.

    For each line of the standard input: a step without a save, a save, and a step; then a line of JSON with seconds.
    """
    gate = timed_gate()
    for number, _ in enumerate(sys.stdin):
        begun = time.perf_counter()
        yield
        step = time.perf_counter() - begun
        called, begun = time.time(), time.perf_counter()
        path = save(number)
        call = time.perf_counter() - begun
        gate.clear()
        begun = time.perf_counter()
        yield
        found = {"call": call, "gate": sum(gate), "step": step}
        found["next_step"] = time.perf_counter() - begun
        found["commit"] = commit_time(path) - called if ours else call + sync(path)
        print("SAMPLE", json.dumps(found), flush=True)


def timed_gate() -> list[float]:
    """The seconds of each wait of an optimizer's step for a save's reads, as they come."""
    from dcp_datastates.staging.deferred_reads import DeferredReads

    waits: list[float] = []
    original = DeferredReads.release_for

    def release_for(self: Any, *arguments: Any, **keywords: Any) -> Any:
        begun = time.perf_counter()
        try:
            return original(self, *arguments, **keywords)
        finally:
            waits.append(time.perf_counter() - begun)

    DeferredReads.release_for = release_for  # type: ignore[method-assign]
    return waits


def commit_time(path: Path) -> float:
    """Wait for the commit, and return its time: publishing is a rename, which sets the time of change."""
    while not (path / ".metadata").exists():
        time.sleep(0.01)
    return (path / ".metadata").stat().st_ctime


def sync(path: Path) -> float:
    """Seconds to bring the files at ``path`` to storage, as frameworks do not."""
    begun = time.perf_counter()
    for each in [path, *path.rglob("*")]:
        file = os.open(each, os.O_RDONLY)
        os.fsync(file)
        os.close(file)
    return time.perf_counter() - begun


def accelerate(folder: Path, ours: bool) -> None:
    from accelerate import Accelerator

    from dcp_datastates.huggingface import DataStatesAccelerator

    options = {"host_cache_size": CACHE} if ours else {}
    made = (DataStatesAccelerator if ours else Accelerator)(cpu=True, **options)
    model = Model()
    model, optimizer = made.prepare(model, torch.optim.AdamW(model.parameters()))

    def save(number: int) -> Path:
        return Path(made.save_state(str(folder / str(number))))

    for _ in rounds(save, ours):
        made.backward(model(torch.randn(BATCH, WIDTH))["loss"])
        optimizer.step()
        optimizer.zero_grad()


def deepspeed(folder: Path, ours: bool) -> None:
    sys.path.append(str(Path(__file__).parents[1] / "integration" / "deepspeed"))
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    configuration: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 1_000_000,
    }
    if ours:
        configuration["datastates_ckpt"] = {"host_cache_size": CACHE / (1 << 30)}
    deepspeed.init_distributed("gloo")
    model = Model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=configuration
    )

    def save(number: int) -> Path:
        engine.save_checkpoint(folder, tag=str(number))
        return folder / str(number)

    for _ in rounds(save, ours):
        engine.backward(engine(torch.randn(BATCH, WIDTH))["loss"])
        engine.step()


def lightning(folder: Path, ours: bool) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import SingleDeviceStrategy

    from dcp_datastates.lightning import DataStatesSingleDeviceStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: torch.Tensor, _: int) -> Any:
            return self.model(batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class Rounds(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.should_stop = next(turns, True) is True

    def save(number: int) -> Path:
        path = folder / str(number) / "saved.ckpt"
        trainer.save_checkpoint(path)
        return path if ours else path.parent

    turns = rounds(save, ours)
    options: dict[str, Any] = {"host_cache_size": CACHE} if ours else {}
    strategy = (DataStatesSingleDeviceStrategy if ours else SingleDeviceStrategy)("cpu", **options)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=-1,
        callbacks=[Rounds()],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.DataLoader(torch.randn(64 * BATCH, WIDTH), BATCH)
    trainer.fit(Module(), data)


def transformers(folder: Path, ours: bool) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from dcp_datastates.huggingface import DataStatesTrainer

    class Rounds(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = next(turns, True) is True

    def save(number: int) -> Path:
        trainer._save_checkpoint(trainer.model, trial=None)
        return folder / f"checkpoint-{trainer.state.global_step}"

    turns = rounds(save, ours)
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        max_steps=1_000_000,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    options = {"host_cache_size": CACHE} if ours else {}
    trainer = (DataStatesTrainer if ours else Trainer)(
        model=Model(),
        args=arguments,
        train_dataset=[{"x": each} for each in torch.randn(64 * BATCH, WIDTH)],
        callbacks=[Rounds()],
        **options,
    )
    trainer.train()


FRAMEWORKS = {each.__name__: each for each in (accelerate, deepspeed, lightning, transformers)}


if __name__ == "__main__":
    name, kind, folder = sys.argv[1:]
    FRAMEWORKS[name](Path(folder), kind == "ours")
