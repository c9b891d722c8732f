"""The program of the examples: LoRA with TRL's trainer, on a small model and a few rows of text."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from support.commands import ROOT, run, run_cli
from support.state.checkpoints import assert_same
from support.state.roots import committed_names

pytest.importorskip("trl")
pytest.importorskip("peft")

PROGRAM = str(ROOT / "examples/lora_sft_trainer.py")


def make_inputs(folder: Path) -> None:
    """``base``, a model with a tokenizer, and ``data.jsonl``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from trl_job import tokenizer

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    tokenizer().save_pretrained(folder / "base")
    rows = [" ".join(f"w{(i * 7 + j) % 60}" for j in range(8)) for i in range(32)]
    text = "".join(json.dumps({"text": row}) + "\n" for row in rows)
    (folder / "data.jsonl").write_text(text)


def test_a_killed_run_ends_with_the_adapter_of_one_that_was_not(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    adapters = []
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        make_inputs(folder)
        command = [sys.executable, PROGRAM, "base", "data.jsonl", "12"]
        if name == "killed":
            kill = {"DCP_DATASTATES_FAILPOINTS": "publish.link.before@2=kill"}
            run(command, folder, expect=-signal.SIGKILL, **environment, **kill)
            assert committed_names(folder / "job") == ["checkpoint-5"]
        run(command, folder, **environment)
        assert committed_names(folder / "job") == ["checkpoint-10", "checkpoint-12"]
        adapter = folder / "adapter"
        converted = run_cli("convert", folder / "job/checkpoint-12", adapter, "--to", "peft")
        assert converted.returncode == 0, converted.stderr
        adapters.append(load_file(adapter / "adapter_model.safetensors"))
    assert_same(*adapters)
    assert any(tensor.any() for name, tensor in adapters[0].items() if "lora_B" in name)
