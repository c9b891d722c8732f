"""Programs of one process with the real Accelerate and Trainer: hooks, optimizers, changing over, installing."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.state.files import data_files, flip_bit
from support.state.roots import committed_names
from support.stores.server import BUCKET, endpoint, use

import dcp_datastates as ds


def test_options_are_checked_when_the_accelerator_is_made() -> None:
    from dcp_datastates.huggingface import DataStatesAccelerator

    with pytest.raises(ds.errors.ConfigurationError, match="host_cache_size"):
        DataStatesAccelerator(cpu=True, host_cache_size="much")
    with pytest.raises(ds.errors.ConfigurationError, match="max_failures"):
        DataStatesAccelerator(cpu=True, max_failures="yes")


def _accelerator(made: Any, root: Path | str) -> Any:
    """An accelerator of a new process, with a prepared model and optimizer."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import ProjectConfiguration

    AcceleratorState._reset_state(True)
    assert PartialState().num_processes == 1
    naming = ProjectConfiguration(str(root), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = made(cpu=True, project_config=naming)
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 30)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator


def _train_a_step(accelerator: Any) -> torch.Tensor:
    (model,), (optimizer,) = accelerator._models, accelerator._optimizers
    accelerator.backward(model(torch.randn(4, 30)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return model.weight.detach().clone()  # type: ignore[no-any-return]


def test_a_job_of_accelerate_changes_over_and_numbers_go_on(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from dcp_datastates.huggingface import DataStatesAccelerator

    stock = _accelerator(Accelerator, tmp_path)
    for _ in range(3):
        weight = _train_a_step(stock)
        stock.save_state()
    folder = tmp_path / "checkpoints"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    ours = _accelerator(DataStatesAccelerator, tmp_path)
    ours.project_configuration.iteration = 2
    with pytest.raises(ValueError, match="checkpoint of Accelerate itself"):
        ours.save_state()
    ours.load_state()
    assert torch.equal(ours._models[0].weight, weight)
    weight = _train_a_step(ours)
    assert Path(ours.save_state()).name == "checkpoint_3"
    ours.wait_for_saves()
    assert {path: path.read_bytes() for path in before} == before

    again = _accelerator(DataStatesAccelerator, tmp_path)
    again.load_state()
    assert torch.equal(again._models[0].weight, weight)
    assert again.save_iteration == 4
    again.load_state(str(folder / "checkpoint_2"))  # back, to one of Accelerate's own
    assert again.save_iteration == 3
    with pytest.raises(ValueError, match="load the newest one"):
        again.save_state()
    again.project_configuration.automatic_checkpoint_naming = False
    with pytest.raises(ValueError, match="checkpoint of Accelerate itself"):
        again.save_state(str(folder / "checkpoint_2"))


def test_hooks_that_save_and_load_a_model_by_themselves(tmp_path: Path) -> None:
    """As in the scripts of diffusers for LoRA."""
    from dcp_datastates.huggingface import DataStatesAccelerator

    accelerator = _accelerator(DataStatesAccelerator, tmp_path)

    def save(models: Any, weights: Any, folder: str) -> None:
        torch.save(models[0].state_dict(), Path(folder, "lora.bin"))
        weights.pop()

    def load(models: Any, folder: str) -> None:
        models.pop().load_state_dict(torch.load(Path(folder, "lora.bin")))
        assert not models

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    weight = _train_a_step(accelerator)
    path = accelerator.save_state()
    accelerator.wait_for_saves()
    assert "model_0" not in ds.load(path)
    _train_a_step(accelerator)
    accelerator.load_state()
    assert torch.equal(accelerator._models[0].weight, weight)


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_accelerate_leaves_out_a_damaged_newest(tmp_path: Path, damage: str) -> None:
    from dcp_datastates.huggingface import DataStatesAccelerator

    accelerator = _accelerator(DataStatesAccelerator, tmp_path)
    weights = []
    for _ in range(2):
        weights.append(_train_a_step(accelerator))
        path = accelerator.save_state()
    accelerator.wait_for_saves()
    (file,) = data_files(Path(path))
    if damage == "flip":
        flip_bit(file, file.stat().st_size // 2)
    else:
        file.write_bytes(file.read_bytes()[:-1])
    _train_a_step(accelerator)
    accelerator.load_state()
    assert torch.equal(accelerator._models[0].weight, weights[0])
    assert accelerator.save_iteration == 1
    with pytest.raises(
        ds.errors.CheckpointCorruptError
    ):  # a program goes by the number in the name
        accelerator.load_state(path)


@pytest.mark.parametrize("whose", ["ours", "stock"])
def test_on_a_first_run_accelerate_has_nothing_to_load(tmp_path: Path, whose: str) -> None:
    from accelerate import Accelerator

    from dcp_datastates.huggingface import DataStatesAccelerator

    made = DataStatesAccelerator if whose == "ours" else Accelerator
    accelerator = _accelerator(made, tmp_path / "run")
    with pytest.raises(FileNotFoundError) as caught:
        accelerator.load_state()
    with pytest.raises(ValueError, match="folder does not exist"):
        accelerator.load_state(str(tmp_path / "other"))
    if whose == "ours":
        assert "is not None: accelerator.load_state()" in str(caught.value)


SCRIPT = """
import sys

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, Seq2SeqTrainer, Trainer, TrainingArguments

config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=2)
data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
args = TrainingArguments(sys.argv[1], max_steps=2, save_steps=1, use_cpu=True, report_to=[])
Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=data).train()
print(issubclass(Seq2SeqTrainer, Trainer), Accelerator.__module__, sys.argv[1:])
"""


@pytest.mark.parametrize("way", ["script", "module", "only"])
def test_a_program_of_somebody_else_gets_the_classes(way: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    what = {
        "script": ["program.py"],
        "module": ["-m", "program"],
        "only": ["--only=trainer", "program.py"],
    }[way]
    command = [sys.executable, "-m", "dcp_datastates.huggingface", *what, "out", "--flag"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    whose = "accelerate.accelerator" if way == "only" else "dcp_datastates.huggingface.accelerator"
    assert ended.stdout.splitlines()[-1] == f"True {whose} ['out', '--flag']"
    assert committed_names(tmp_path / "out") == ["checkpoint-1", "checkpoint-2"]
    if way == "script":  # another run, with an option of these classes
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert "checkpoint-2 of a former run" in ended.stderr
        command[3:3] = ["--set", "fresh=replace"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_trainers_of_trl(kind: str, tmp_path: Path) -> None:
    """Four steps at once; and two, and two more in another process."""
    pytest.importorskip("trl")
    script = str(Path(__file__).with_name("trl_job.py"))
    found = []
    for folder, steps, resume in (("whole", "4", "no"), ("half", "2", "no"), ("half", "4", "yes")):
        command = [sys.executable, script, kind, str(tmp_path / folder), steps, resume]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
        (line,) = [each for each in ended.stdout.splitlines() if each.startswith("WEIGHTS ")]
        found.append(json.loads(line.removeprefix("WEIGHTS ")))
    assert committed_names(tmp_path / "half") == ["checkpoint-2", "checkpoint-4"]
    assert found[2] == found[0] != found[1]


def test_a_name_that_cannot_be_installed_is_refused() -> None:
    command = [sys.executable, "-m", "dcp_datastates.huggingface", "--only", "trainr", "x.py"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "choose of accelerate, trainer" in ended.stderr
    for option in ("missing", "missing=some", "mising=warn", "freshly=1"):
        command[4:] = ["trainer", "--set", option, "x.py"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 2, option
        assert option.partition("=")[0] in ended.stderr


def test_a_hook_may_change_the_weights_that_are_saved(tmp_path: Path) -> None:
    from dcp_datastates.huggingface import DataStatesAccelerator

    accelerator = _accelerator(DataStatesAccelerator, tmp_path)

    def halve(models: Any, weights: Any, folder: str) -> None:
        weights[0] = {name: value / 2 for name, value in weights[0].items()}

    accelerator.register_save_state_pre_hook(halve)
    weight = _train_a_step(accelerator)
    path = accelerator.save_state()
    accelerator.wait_for_saves()
    accelerator.load_state(path)
    assert torch.equal(accelerator._models[0].weight, weight / 2)


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in ("", ".accelerator", ".trainer"):
        monkeypatch.delitem(sys.modules, f"dcp_datastates.huggingface{module}", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ImportError, match=r"pip install 'accelerate>=1\.15,<1\.16' 'transformers>=5'"
    ):
        _ = importlib.import_module("dcp_datastates.huggingface").DataStatesTrainer


def test_accelerate_saves_to_a_store_and_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dcp_datastates.huggingface import DataStatesAccelerator

    use(endpoint())
    monkeypatch.chdir(tmp_path)
    root = f"s3://{BUCKET}/{tmp_path.parent.name}/{tmp_path.name}"
    ours = _accelerator(DataStatesAccelerator, root)
    for number in range(3):
        weight = _train_a_step(ours)
        assert ours.save_state() == f"{root}/checkpoints/checkpoint_{number}"
    ours.wait_for_saves()
    assert [each.name for each in ds.inspect(f"{root}/checkpoints").checkpoints] == [
        "checkpoint_2",
        "checkpoint_1",
    ]

    again = _accelerator(DataStatesAccelerator, root)
    again.load_state()
    assert torch.equal(again._models[0].weight, weight)
    assert again.save_iteration == 3
    again.project_configuration.automatic_checkpoint_naming = False
    later = _train_a_step(again)
    assert again.save_state(f"{root}/mine") == f"{root}/mine"
    again.wait_for_saves()
    again.load_state(f"{root}/checkpoints/checkpoint_2")
    assert torch.equal(again._models[0].weight, weight)
    again.load_state(f"{root}/mine")
    assert torch.equal(again._models[0].weight, later)
    with pytest.raises(ds.errors.ConfigurationError, match="has lost a slash"):
        again.save_state(Path(f"{root}/mine"))
    assert list(tmp_path.iterdir()) == []


def test_the_trainer_refuses_a_url_before_it_makes_a_directory_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import TrainingArguments

    from dcp_datastates.huggingface import DataStatesTrainer

    monkeypatch.chdir(tmp_path)
    for given in ("s3://bucket/run", Path("s3://bucket/run")):
        args = TrainingArguments(output_dir=given, use_cpu=True, report_to=[])
        for keywords in ({"args": args}, {}):
            positional = () if keywords else (torch.nn.Linear(2, 2), args)
            with pytest.raises(
                ds.errors.ConfigurationError, match=r"output_dir='s3:/.*bucket/run'"
            ):
                DataStatesTrainer(*positional, **keywords)
    assert list(tmp_path.iterdir()) == []
