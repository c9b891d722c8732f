"""What users of the Trainer do, each beside the Trainer of transformers: the table in README.md."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.state.files import data_files, flip_bit
from support.state.metadata import decision_of
from support.state.roots import committed_names
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

import dcp_datastates as ds
from huggingface_jobs import NotingStockTrainer as Stock
from huggingface_jobs import NotingTrainer as Ours

VOCABULARY = 32
STOCK_WEIGHTS = {"model.safetensors", "optimizer.pt"}


def llama(seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            attention_dropout=0.1,
        )
    )


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        {"input_ids": each, "labels": each}
        for each in torch.randint(VOCABULARY, (16, 8), generator=generator)
    ]


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    settings = {
        "max_steps": 4,
        "save_steps": 2,
        "save_strategy": "steps",
        "lr_scheduler_type": "constant",  # whatever max_steps says
        **given,
    }
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        use_cpu=True,
        seed=3,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_strategy="no",
        **settings,
    )


BOTH = [pytest.param(Ours, id="ours"), pytest.param(Stock, id="stock")]


def run(kind: Any, folder: Path, resume: Any = None, model: Any = None, **given: Any) -> Any:
    """A trainer that has trained."""
    keywords = {
        name: given.pop(name)
        for name in ("callbacks", "processing_class", "fresh")
        if name in given
    }
    trainer = kind(
        model=model or llama(9 if resume else 1),
        args=arguments(folder, **given),
        train_dataset=data(),
        **keywords,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def tokenizer(folder: Path) -> Any:
    words = {f"w{number}": number for number in range(VOCABULARY)}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), unk_token="w0"
    )
    made.pad_token = "w1"
    return made


# ---- what a checkpoint has ---------------------------------------------------------------------


def test_a_checkpoint_has_the_small_files_that_the_trainer_saves(tmp_path: Path) -> None:
    for kind, name in ((Ours, "ours"), (Stock, "stock")):
        run(kind, tmp_path / name, processing_class=tokenizer(tmp_path), max_steps=2)
    theirs = {
        path.name: path.read_bytes() for path in (tmp_path / "stock" / "checkpoint-2").iterdir()
    }
    files = ds.load(tmp_path / "ours" / "checkpoint-2", only="files")["files"]["rank-0"]
    assert files.keys() == theirs.keys() - STOCK_WEIGHTS
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        assert files[name] == theirs[name], name


def adapted(seed: int, kind: str) -> Any:
    """A model with two adapters, of which the second one is frozen, as DPO has it."""
    import peft

    common: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    config = {
        "lora": lambda: peft.LoraConfig(
            r=2, target_modules=["q_proj"], init_lora_weights=False, **common
        ),
        "dora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, **common),
        "modules": lambda: peft.LoraConfig(
            r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], **common
        ),
        "tokens": lambda: peft.LoraConfig(
            r=2, target_modules=["q_proj"], trainable_token_indices=[1, 2], **common
        ),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=2, **common),
        "vera": lambda: peft.VeraConfig(target_modules=["q_proj"], **common),
    }[kind]
    base = llama()
    torch.manual_seed(seed)
    model = peft.get_peft_model(base, config(), adapter_name="trained")
    model.add_adapter("reference", config())
    model.set_adapter("trained")
    return model


def of_adapters(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: each.detach().clone()
        for name, each in model.named_parameters()
        if {"trained", "reference"} & set(name.split("."))
    }


@pytest.mark.parametrize("kind", ["lora", "dora", "modules", "tokens", "prompt", "vera"])
def test_every_adapter_comes_back(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("peft")
    whole = run(Ours, tmp_path / "whole", model=adapted(5, kind))
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "part" / "checkpoint-2")
    resumed = run(Ours, tmp_path / "part", resume=True, model=adapted(77, kind))
    assert resumed.losses == {step: whole.losses[step] for step in (3, 4)}
    expected, found = of_adapters(whole.model), of_adapters(resumed.model)
    assert any("reference" in name for name in expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    files = ds.load(tmp_path / "whole" / "checkpoint-2", only="files")["files"]["rank-0"]
    assert {"trained/adapter_config.json", "reference/adapter_config.json"} <= files.keys()
    stored = ds.load(tmp_path / "whole" / "checkpoint-2", only="model")["model"]
    assert not any("mlp" in name for name in stored)  # the frozen base


class Export(TrainerCallback):
    """Writes into the checkpoint's directory, as many callbacks do."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        self.found.append(folder.is_dir())
        (folder / "export").mkdir()
        (folder / "export" / "step").write_text(str(state.global_step))
        (folder / "note").write_text("mine")


@pytest.mark.parametrize("kind", BOTH)
def test_files_of_callbacks_belong_to_the_checkpoint(tmp_path: Path, kind: Any) -> None:
    export = Export()
    run(kind, tmp_path, callbacks=[export], max_steps=8, save_total_limit=2)
    assert export.found == [True] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-6", "checkpoint-8"]
    assert (tmp_path / "checkpoint-8" / "export" / "step").read_text() == "8"
    if kind is Ours:
        files = ds.load(tmp_path / "checkpoint-6", only="files")["files"]["rank-0"]
        assert (files["export/step"], files["note"]) == (b"6", b"mine")


def test_large_files_of_callbacks_stay_beside_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = importlib.import_module("dcp_datastates.huggingface.files")
    monkeypatch.setattr(files, "MOST_BYTES", 4)
    run(Ours, tmp_path, callbacks=[Export()], max_steps=4, save_total_limit=1)
    assert "are no part of the checkpoint's commit" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
    assert "note" not in ds.load(tmp_path / "checkpoint-4", only="files")["files"]["rank-0"]


# ---- which checkpoint is resumed ---------------------------------------------------------------


def cut(folder: Path) -> None:
    file = data_files(folder)[0]
    os.truncate(file, file.stat().st_size // 2)


def flip(folder: Path) -> None:
    file = data_files(folder)[0]
    flip_bit(file, file.stat().st_size // 2)


def no_metadata(folder: Path) -> None:
    decision_of(folder).write_bytes(b"")


def no_commit(folder: Path) -> None:
    decision_of(folder).unlink()


def nothing(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGES = [cut, flip, no_metadata, no_commit, nothing]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(Ours, folder, max_steps=6).losses


@pytest.mark.parametrize("by", ["True", "path"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_that_can_be_loaded_is_resumed(
    tmp_path: Path,
    whole: tuple[Path, dict[int, float]],
    damage: Callable[[Path], None],
    by: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """``get_last_checkpoint`` chooses by the number alone: run_clm.py, TRL, axolotl and LLaMA-Factory call it."""
    folder, losses = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "checkpoint-6")
    resume: Any = True
    if by == "path":
        resume = get_last_checkpoint(str(tmp_path))
        assert Path(resume).name == "checkpoint-6"
    resumed = run(Ours, tmp_path, resume=resume, max_steps=6)
    assert resumed.losses == {step: losses[step] for step in (5, 6)}
    assert by == "True" or "checkpoint-6" in caplog.text


def test_an_older_checkpoint_that_is_named_is_the_one_that_is_loaded(
    tmp_path: Path, whole: tuple[Path, dict[int, float]]
) -> None:
    folder, losses = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    resumed = run(Ours, tmp_path, resume=tmp_path / "checkpoint-2", max_steps=4)
    assert resumed.losses == {step: losses[step] for step in (3, 4)}
    flip(tmp_path / "checkpoint-2")
    with pytest.raises(ds.errors.CheckpointCorruptError):
        run(Ours, tmp_path, resume=tmp_path / "checkpoint-2")


def test_if_all_are_damaged_the_run_does_not_start_over(
    tmp_path: Path, whole: tuple[Path, dict[int, float]]
) -> None:
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("checkpoint-*"):
        flip(path)
    with pytest.raises(ds.errors.CheckpointCorruptError, match="none of the 3 checkpoints"):
        run(Ours, tmp_path, resume=True)


@pytest.mark.parametrize("kind", BOTH)
def test_on_a_first_run_there_is_nothing_to_resume(tmp_path: Path, kind: Any) -> None:
    words = "No valid checkpoint found in output directory"
    with pytest.raises(ValueError, match=words) as caught:
        run(kind, tmp_path, resume=True)
    with pytest.raises(ValueError, match="Can't find a valid checkpoint at"):
        run(kind, tmp_path, resume=tmp_path / "checkpoint-2")
    if kind is Ours:
        line = "trainer.train(resume_from_checkpoint=dcp_datastates.latest(args.output_dir))"
        assert line in str(caught.value)
        assert run(Ours, tmp_path, resume=ds.latest(tmp_path)).losses.keys() == {1, 2, 3, 4}


SETTINGS: dict[str, dict[str, Any]] = {
    "each epoch": {"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "adafactor": {"optim": "adafactor"},
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "rmsprop": {"optim": "rmsprop"},
    "cosine": {"lr_scheduler_type": "cosine"},
    "warm-up": {"lr_scheduler_type": "linear", "warmup_steps": 3},
    "smaller batches": {"auto_find_batch_size": True},
    "checkpointed activations": {"gradient_checkpointing": True},
    "NEFTune": {"neftune_noise_alpha": 5},
    "fused": {"optim": "adamw_torch_fused", "weight_decay": 0.1},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_with_all_settings_a_resumed_run_goes_on_alike(tmp_path: Path, setting: str) -> None:
    given = SETTINGS[setting]
    losses = run(Ours, tmp_path / "whole", **given).losses
    first = min(tmp_path.glob("whole/checkpoint-*"), key=lambda each: int(each.name[11:]))
    shutil.copytree(first, tmp_path / "part" / first.name)
    resumed = run(Ours, tmp_path / "part", resume=True, **given).losses
    done = int(first.name.removeprefix("checkpoint-"))
    assert resumed == {step: loss for step, loss in losses.items() if step > done}
    assert len(resumed) in (2, 8)


class Preempted(TrainerCallback):
    """Asks for the checkpoint of a job that gets SIGTERM, as the Trainer's own handler does after some seconds."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            self.manager.is_checkpoint_requested = True

    manager: Any = None


def test_a_preempted_job_saves_at_its_step(tmp_path: Path) -> None:
    """The Trainer saves without ``on_save``, and takes another step before it ends."""
    losses = run(Ours, tmp_path / "whole", max_steps=6).losses
    callback = Preempted()
    trainer = Ours(
        model=llama(),
        args=arguments(tmp_path / "jit", max_steps=6, enable_jit_checkpoint=True),
        train_dataset=data(),
    )
    jit = trainer.callback_handler.callbacks
    callback.manager = next(each.jit_manager for each in jit if hasattr(each, "jit_manager"))
    jit.insert(0, callback)
    trainer.train()
    assert "checkpoint-3" in committed_names(tmp_path / "jit")
    resumed = run(Ours, tmp_path / "jit", resume=tmp_path / "jit" / "checkpoint-3", max_steps=6)
    assert resumed.losses == {step: losses[step] for step in (4, 5, 6)}


# ---- changing over -----------------------------------------------------------------------------


def test_a_run_changes_over_and_the_limit_counts_all_checkpoints(tmp_path: Path) -> None:
    losses = run(Ours, tmp_path / "whole", max_steps=10).losses
    run(Stock, tmp_path / "run", max_steps=6)
    resumed = run(Ours, tmp_path / "run", resume=True, max_steps=8, save_total_limit=3)
    assert resumed.losses == {step: losses[step] for step in (7, 8)}
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]
    resumed = run(Ours, tmp_path / "run", resume=True, max_steps=10, save_total_limit=2)
    assert resumed.losses == {step: losses[step] for step in (9, 10)}
    assert committed_names(tmp_path / "run") == ["checkpoint-10", "checkpoint-8"]
    assert len(list((tmp_path / "run").iterdir())) == 2


@pytest.mark.parametrize("before", BOTH)
def test_one_directory_has_one_run(tmp_path: Path, before: Any) -> None:
    """Stock mixes both: a later resume goes on from the older run, whose numbers are higher."""
    run(before, tmp_path, max_steps=6)
    there = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ds.errors.ConfigurationError, match="checkpoint-6 of a former run"):
        run(Ours, tmp_path, max_steps=2)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == there
    run(Ours, tmp_path, max_steps=2, save_strategy="no")  # it saves nothing
    run(Ours, tmp_path, max_steps=4, save_total_limit=1, fresh="replace")
    (aside,) = tmp_path.glob("set-aside-*")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", aside.name]
    assert {aside / path.relative_to(tmp_path): data for path, data in there.items()} == {
        path: path.read_bytes() for path in aside.rglob("*") if path.is_file()
    }
    resumed = run(Ours, tmp_path, resume=True, max_steps=6)
    assert resumed.losses.keys() == {5, 6}


def test_a_trainer_may_train_again(tmp_path: Path) -> None:
    trainer = run(Ours, tmp_path, max_steps=4)
    trainer.train()
    assert committed_names(tmp_path) == ["checkpoint-2", "checkpoint-4"]


def test_a_run_goes_on_from_a_checkpoint_elsewhere(tmp_path: Path) -> None:
    losses = run(Ours, tmp_path / "one", max_steps=4).losses
    resumed = run(Ours, tmp_path / "two", resume=tmp_path / "one" / "checkpoint-2", max_steps=4)
    assert resumed.losses == {step: losses[step] for step in (3, 4)}
    with pytest.raises(ds.errors.ConfigurationError, match="checkpoint-4 of a former run"):
        run(Ours, tmp_path / "two", resume=tmp_path / "one" / "checkpoint-2", max_steps=4)


# ---- exports -----------------------------------------------------------------------------------


def test_a_checkpoint_becomes_a_model_with_its_own_tokenizer_and_configuration(
    tmp_path: Path,
) -> None:
    """The vocabulary was resized, so the base model's configuration and tokenizer would not fit."""
    base, words = llama(), tokenizer(tmp_path)
    words.add_tokens(["<a>", "<b>"])
    base.resize_token_embeddings(len(words))
    run(Ours, tmp_path, model=base, processing_class=words, max_steps=2)
    checkpoint, out = tmp_path / "checkpoint-2", tmp_path / "out"
    ds.convert(checkpoint, out, "hf", part="model")
    assert len(AutoTokenizer.from_pretrained(out)) == VOCABULARY + 2
    found = AutoModelForCausalLM.from_pretrained(out)
    for name, tensor in base.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def test_the_trainer_itself_resumes_from_what_convert_makes(tmp_path: Path) -> None:
    losses = run(Ours, tmp_path / "whole", max_steps=6).losses
    out = tmp_path / "stock" / "checkpoint-4"
    ds.convert(tmp_path / "whole" / "checkpoint-4", out, "hf")
    resumed = run(Stock, tmp_path / "stock", resume=True, max_steps=6)
    assert resumed.losses == {step: losses[step] for step in (5, 6)}
    theirs = {path.name for path in (tmp_path / "stock" / "checkpoint-6").iterdir()}
    assert {path.name for path in out.iterdir()} == theirs
    resumed = run(Ours, tmp_path / "stock", resume=out, max_steps=6, save_strategy="no")
    assert resumed.losses == {step: losses[step] for step in (5, 6)}
