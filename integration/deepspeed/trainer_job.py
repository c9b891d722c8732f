"""The stock Trainer of transformers over DeepSpeed, with ``save_total_limit=1``; one rank.

``python trainer_job.py FOLDER RESUME KILL_AT``: prints the losses as JSON. After the save of step ``KILL_AT`` has
returned and the Trainer has deleted older checkpoints, it kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import dcp_datastates.deepspeed  # noqa: F401 - below transformers

# The extension cannot be built everywhere, and is not needed.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Kill(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, resume: str, kill_at: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    numbers = torch.Generator().manual_seed(1)
    tokens = torch.randint(128, (64, 16), generator=numbers)
    args = TrainingArguments(
        output_dir=folder,
        max_steps=6,
        save_steps=2,
        save_total_limit=1,
        logging_steps=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        bf16=True,
        disable_tqdm=True,
        ddp_backend="gloo",
        optim="adamw_torch",
        deepspeed={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": True},
            "zero_force_ds_cpu_optimizer": False,
            "datastates_ckpt": {"host_cache_size": 0.5},
        },
    )
    job = Trainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=[{"input_ids": each, "labels": each} for each in tokens],
        callbacks=[Kill(int(kill_at))],
    )
    job.train(resume_from_checkpoint=resume == "yes")
    losses = {each["step"]: each["loss"] for each in job.state.log_history if "loss" in each}
    print("LOSSES", json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
