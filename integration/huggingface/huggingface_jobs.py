"""Training jobs with the real Accelerate and the real Trainer of transformers, as the ranks run them."""

from __future__ import annotations

import functools
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    set_seed,
)
from support.waiting import await_that
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import dcp_datastates as ds
from dcp_datastates.huggingface import DataStatesAccelerator, DataStatesTrainer

LAYER = "LlamaDecoderLayer"
TOKENS = 16
EXAMPLES = 48


def use_cpu_for_fsdp() -> None:
    """Accelerate turns FSDP on for accelerators only (``AcceleratorState.__init__``); its FSDP2 code works on a CPU."""
    if hasattr(AcceleratorState, "_without_cpu"):
        return
    AcceleratorState._without_cpu = AcceleratorState.__init__

    @functools.wraps(AcceleratorState.__init__)
    def init(self: Any, *arguments: Any, fsdp_plugin: Any = None, **keywords: Any) -> None:
        AcceleratorState._without_cpu(self, *arguments, fsdp_plugin=fsdp_plugin, **keywords)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


def tiny_llama(dropout: float = 0.1) -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1024,
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            attention_dropout=dropout,
            tie_word_embeddings=False,
        )
    )


def examples() -> list[dict[str, torch.Tensor]]:
    data = torch.Generator().manual_seed(2)
    tokens = torch.randint(1024, (EXAMPLES, TOKENS), generator=data)
    return [{"input_ids": each, "labels": each} for each in tokens]


def kill(root: Path, begun: str, committed: str | None = None) -> None:
    """Kill this rank once the save to ``begun`` has begun, and ``committed`` is committed."""
    await_that(lambda: list((root / begun).glob("[!.]*/")))
    if committed is not None:
        await_that((root / committed / ".metadata").exists)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


class Progress:
    """An object of the user that is registered for checkpoints."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def accelerate(
    folder: str,
    *,
    steps: int = 7,
    every: int = 2,
    fsdp: bool = True,
    stock: bool = False,
    resume: bool | str = False,
    limit: int | None = None,
    stateful: bool = False,
    kill_after: int | None = None,
    killing: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A loop of Accelerate's users. ``resume`` is a path, or True for the newest. With ``stateful``, checkpoints hold
    the position of the data loader.
    """
    warnings.simplefilter("ignore")
    use_cpu_for_fsdp()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[LAYER],
        state_dict_type="SHARDED_STATE_DICT",
    )
    made = Accelerator if stock else DataStatesAccelerator
    accelerator = made(
        cpu=True,
        fsdp_plugin=plugin if fsdp else None,
        project_config=ProjectConfiguration(
            folder, automatic_checkpoint_naming=True, total_limit=limit
        ),
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True, data_seed=3, use_stateful_dataloader=stateful
        ),
        **(options or {}),
    )
    assert accelerator.is_fsdp2 == fsdp
    set_seed(5, device_specific=True)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    loader = DataLoader(examples(), batch_size=2, shuffle=True, generator=torch.Generator())
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    compared = 0
    if resume:
        accelerator.load_state(None if resume is True else resume)
        compared = same(resume, model, optimizer.optimizer) if isinstance(resume, str) else 0

    losses = {}
    for batch in loader if stateful else accelerator.skip_first_batches(loader, progress.step):
        if progress.step == steps:
            break
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.step += 1
        losses[progress.step] = float(loss.detach()).hex()
        if progress.step % every == 0:
            accelerator.save_state()
        if progress.step == kill_after:
            kill(Path(folder, "checkpoints"), **(killing or {}))
    accelerator.end_training()
    return {"losses": losses, "compared": compared, "lr": scheduler.get_last_lr()}


def same(path: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The number of parameters, which equal those that :func:`dcp_datastates.load` reads, with their moments."""
    try:
        stored = ds.load(path, only=["model_0", "optimizer_0"])
    except ds.errors.CheckpointNotFoundError:  # Accelerate's own
        return 0
    count = 0
    for full_name, parameter in model.named_parameters():
        name = full_name.removeprefix("module.")
        found = stored["optimizer_0"]["state"][name]
        assert torch.equal(full(parameter), stored["model_0"][name])
        assert torch.equal(full(optimizer.state[parameter]["exp_avg"]), found["exp_avg"])
        count += 1
    return count


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


class Kill(TrainerCallback):
    def __init__(self, step: int, killing: dict[str, Any]) -> None:
        self._step = step
        self._killing = killing

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:  # the save begins after on_save
            kill(Path(args.output_dir), **self._killing)


class Noting:
    """Notes the losses of a trainer by step."""

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        loss = super().training_step(*arguments, **keywords)  # type: ignore[misc]
        vars(self).setdefault("losses", {})[self.state.global_step + 1] = float(loss).hex()  # type: ignore[attr-defined]
        return loss


class NotingTrainer(Noting, DataStatesTrainer):
    pass


class NotingStockTrainer(Noting, Trainer):
    pass


def trainer(
    folder: str,
    *,
    fsdp: bool = True,
    stock: bool = False,
    state_dict_type: str | None = None,
    resume: bool | str = False,
    kill_after: int | None = None,
    killing: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    adapters: bool = False,
    export: str | None = None,
    refused: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """A job of the Trainer. ``adapters``: only those of PEFT are trained. ``export``: where PEFT saves them.
    ``refused``: the last rank has another optimizer, which does not fit.
    """
    warnings.simplefilter("ignore")
    use_cpu_for_fsdp()
    sharding = {"version": 2, "transformer_layer_cls_to_wrap": [LAYER]}
    if state_dict_type is not None:
        sharding["state_dict_type"] = state_dict_type
    settings = {"max_steps": 7, "save_steps": 2, **arguments}
    if refused and dist.get_rank() == dist.get_world_size() - 1:
        settings["optim"] = "sgd"
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        fsdp=fsdp,
        fsdp_config=sharding if fsdp else None,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=5,
        **settings,
    )
    made = NotingStockTrainer if stock else NotingTrainer
    model = tiny_llama()
    if adapters:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], use_dora=True
        )
        model = get_peft_model(model, config)
    job = made(
        model=model,
        args=args,
        train_dataset=examples(),
        eval_dataset=examples()[:4],
        callbacks=[] if kill_after is None else [Kill(kill_after, killing or {})],
        **(options or {}),
    )
    assert job.is_fsdp_enabled == fsdp
    if refused:
        return refusal(job, resume)
    job.train(resume_from_checkpoint=resume)
    sharded = isinstance(next(job.model.parameters()), DTensor)
    assert sharded == fsdp
    if export is not None:
        job.model.save_pretrained(export)
    loaded = 0
    if args.load_best_model_at_end and job.state.best_model_checkpoint is not None:
        stored = ds.load(job.state.best_model_checkpoint, only="model")["model"]
        for name, parameter in job.model.named_parameters():
            loaded += torch.equal(full(parameter), stored[name])
    return {
        "loaded": loaded,
        "losses": job.losses,
        "best": job.state.best_model_checkpoint,
        "lr": job.lr_scheduler.get_last_lr(),
    }


def refusal(job: Any, resume: bool | str) -> dict[str, Any]:
    """The error of a resume that does not fit, and whether the model is as it was made."""
    try:
        job.train(resume_from_checkpoint=resume)
    except ds.errors.IncompatibleStateError as error:
        pairs = zip(job.model.parameters(), tiny_llama().parameters(), strict=True)
        return {"error": str(error), "same": all(torch.equal(full(a), b) for a, b in pairs)}
    return {"error": "", "same": False}
