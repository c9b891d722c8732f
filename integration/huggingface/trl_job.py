"""A trainer of TRL with the mixin: ``trl_job.py KIND FOLDER STEPS RESUME`` prints sums of the weights as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from dcp_datastates.huggingface import DataStatesTrainerMixin

warnings.simplefilter("ignore")


class Supervised(DataStatesTrainerMixin, SFTTrainer):
    pass


class Policy(DataStatesTrainerMixin, GRPOTrainer):
    pass


def tokenizer() -> Any:
    words = {**{f"w{n}": n for n in range(60)}, "<unk>": 60, "<pad>": 61, "<eos>": 62}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(each.split()))) for each in completions]


def main(kind: str, folder: str, steps: str, resume: str) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    settings = {
        "output_dir": folder,
        "max_steps": int(steps),
        "save_steps": 2,
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "seed": 3,
    }
    rows = [" ".join(f"w{(i * 7 + j) % 60}" for j in range(8)) for i in range(32)]
    if kind == "sft":
        args = SFTConfig(**settings, per_device_train_batch_size=2, max_length=16)
        data = Dataset.from_dict({"text": rows})
        job = Supervised(model, args=args, train_dataset=data, processing_class=tokenizer())
    else:
        few = {"num_generations": 2, "max_completion_length": 4}
        args = GRPOConfig(**settings, per_device_train_batch_size=2, **few)
        data = Dataset.from_dict({"prompt": rows})
        job = Policy(model, reward, args=args, train_dataset=data, processing_class=tokenizer())
    job.train(resume_from_checkpoint=resume == "yes")
    weights = {name: float(each.double().sum()).hex() for name, each in model.named_parameters()}
    print("WEIGHTS", json.dumps(weights))


if __name__ == "__main__":
    main(*sys.argv[1:])
