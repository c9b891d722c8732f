"""Jobs of the real Accelerate and the real Trainer on two ranks: killed, resumed, and with failing saves."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from support.processes import Ended, run_ranks

import dcp_datastates as ds

STEPS = 7
LATE = {"read_deadline": 600.0}
"""No tensor of a save is read before the next backward pass: a save whose job is killed before it is not committed."""


class Library(NamedTuple):
    """How a library names its checkpoints."""

    function: str
    below: str
    """The directory of checkpoints, below that of the job."""
    names: dict[int, str]
    """By step."""

    def folder(self, root: Path) -> Path:
        return root / self.below


ACCELERATE = Library(
    "accelerate", "checkpoints", {2: "checkpoint_0", 4: "checkpoint_1", 6: "checkpoint_2"}
)
TRAINER = Library("trainer", "", {number: f"checkpoint-{number}" for number in (2, 4, 6)})
BOTH = [pytest.param(each, id=each.function) for each in (ACCELERATE, TRAINER)]


def job(
    library: Library,
    world: int,
    root: Path,
    scratch: Path,
    environment: dict[str, str] | None = None,
    **arguments: Any,
) -> list[Ended]:
    environments = [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "HF_HUB_OFFLINE": "1",
            **(environment or {}),
        }
        for rank in range(world)
    ]
    return run_ranks(
        f"huggingface_jobs:{library.function}",
        world,
        scratch / "scratch",
        environments=environments,
        folder=str(root),
        **arguments,
    )


def train(library: Library, root: Path, scratch: Path, **arguments: Any) -> dict[str, Any]:
    return next(one.result() for one in job(library, 2, root, scratch, **arguments))


def killed(library: Library, root: Path, scratch: Path, **arguments: Any) -> None:
    """Train until the ranks kill themselves."""
    arguments = {"options": LATE, **arguments}
    ended = job(library, 2, root, scratch, **arguments)
    assert [one.exit_code for one in ended] == [-9, -9], f"{ended[0].error}\n{ended[0].log}"


def committed(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob("*/.metadata")}


def from_step(losses: dict[int, str], first: int) -> dict[int, str]:
    return {number: loss for number, loss in losses.items() if number >= first}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Jobs that nothing interrupted, one for each library: their checkpoints, and their losses by step."""
    done: dict[str, tuple[Path, dict[int, str]]] = {}

    def job_of(library: Library) -> tuple[Path, dict[int, str]]:
        if library.function not in done:
            folder = tmp_path_factory.mktemp("whole")
            losses = train(library, folder, tmp_path_factory.mktemp("scratch"))["losses"]
            assert list(losses) == list(range(1, STEPS + 1))
            done[library.function] = library.folder(folder), losses
        return done[library.function]

    yield job_of
    for folder, _ in done.values():
        shutil.rmtree(folder)


@pytest.mark.parametrize("library", BOTH)
def test_a_killed_job_goes_on_from_the_newest_commit_with_equal_losses(
    tmp_path: Path, whole: Any, library: Library
) -> None:
    names, folder = library.names, library.folder(tmp_path / "killed")
    killing = {"begun": names[6], "committed": names[4]}
    killed(library, tmp_path / "killed", tmp_path, kill_after=6, killing=killing)
    assert committed(folder) == {names[2], names[4]}
    resumed = train(library, tmp_path / "killed", tmp_path, resume=True)
    assert resumed["losses"] == from_step(whole(library)[1], 5)
    assert committed(folder) >= set(names.values())
    for name in committed(folder):
        assert not ds.verify(folder / name).damages


def test_the_trainer_with_ddp(tmp_path: Path) -> None:
    settings = {"fsdp": False, "max_steps": 5}
    losses = train(TRAINER, tmp_path / "whole", tmp_path, **settings)["losses"]
    killing = {"begun": "checkpoint-4", "committed": "checkpoint-2"}
    killed(TRAINER, tmp_path / "killed", tmp_path, kill_after=4, killing=killing, **settings)
    resumed = train(TRAINER, tmp_path / "killed", tmp_path, resume=True, **settings)
    assert resumed["losses"] == from_step(losses, 3)


def test_a_run_with_adapters_saves_them_alone_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    settings = {"fsdp": False, "max_steps": 5, "adapters": True}
    root = tmp_path / "whole"
    exported = tmp_path / "exported"
    losses = train(TRAINER, root, tmp_path, export=str(exported), **settings)["losses"]
    stored = ds.load(root / "checkpoint-5")
    assert all("lora_" in name or "modules_to_save" in name for name in stored["model"])
    ds.convert(root / "checkpoint-5", tmp_path / "adapter", "peft")
    ours, theirs = (
        load_file(each / "adapter_model.safetensors") for each in (tmp_path / "adapter", exported)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    ours, theirs = (
        json.loads((each / "adapter_config.json").read_bytes())
        for each in (tmp_path / "adapter", exported)
    )
    assert ours == theirs

    killing = {"begun": "checkpoint-4", "committed": "checkpoint-2"}
    killed(TRAINER, tmp_path / "killed", tmp_path, kill_after=4, killing=killing, **settings)
    resumed = train(TRAINER, tmp_path / "killed", tmp_path, resume=True, **settings)
    assert resumed["losses"] == from_step(losses, 3)


def test_the_model_alone(tmp_path: Path) -> None:
    found = train(TRAINER, tmp_path / "jobs", tmp_path, save_only_model=True, max_steps=4)
    assert list(found["losses"]) == [1, 2, 3, 4]
    assert set(ds.load(tmp_path / "jobs" / "checkpoint-4")) == {"model", "files"}


@pytest.mark.parametrize("library", BOTH)
def test_a_save_that_was_not_committed_is_not_resumed_from(
    tmp_path: Path, whole: Any, library: Library
) -> None:
    first = library.names[2]
    killed(library, tmp_path / "killed", tmp_path, kill_after=2, killing={"begun": first})
    path = library.folder(tmp_path / "killed") / first
    assert path.is_dir()
    for resume in (True, str(path)):
        for one in job(library, 2, tmp_path / "killed", tmp_path, resume=resume):
            assert "CheckpointNotFoundError: no committed" in one.error or (
                "ValueError: no committed checkpoint in the output directory" in one.error
            )
    again = train(library, tmp_path / "killed", tmp_path)
    assert again["losses"] == whole(library)[1]


@pytest.mark.parametrize(("world", "fsdp"), [(1, False), (3, True)], ids=["1", "3"])
def test_accelerate_at_another_world_size(
    tmp_path: Path, whole: Any, world: int, fsdp: bool
) -> None:
    path = str(whole(ACCELERATE)[0] / ACCELERATE.names[4])
    for one in job(ACCELERATE, world, tmp_path / "other", tmp_path, resume=path, fsdp=fsdp):
        found = one.result()
        assert found["compared"] == 21
        assert list(found["losses"]) == [5, 6, 7]


def test_the_trainer_at_another_world_size(tmp_path: Path, whole: Any) -> None:
    path = str(whole(TRAINER)[0] / TRAINER.names[4])
    for one in job(TRAINER, 3, tmp_path / "other", tmp_path, resume=path):
        assert list(one.result()["losses"]) == [5, 6, 7]


@pytest.mark.parametrize("library", BOTH)
def test_a_failed_save_does_not_end_the_training_and_evicts_nothing(
    tmp_path: Path, whole: Any, library: Library
) -> None:
    second = {"DCP_DATASTATES_FAILPOINTS": "flush.open.before@2=error:ENOSPC"}
    one = {"limit": 1} if library is ACCELERATE else {"save_total_limit": 1}
    names, folder = library.names, library.folder(tmp_path / "killed")
    killing = {"begun": names[6], "committed": names[2]}
    killed(
        library,
        tmp_path / "killed",
        tmp_path,
        environment=second,
        kill_after=6,
        killing=killing,
        **one,
    )
    assert committed(folder) == {names[2]}

    folder = library.folder(tmp_path / "unharmed")
    found = train(library, tmp_path / "unharmed", tmp_path, environment=second, **one)
    assert found["losses"] == whole(library)[1]
    last = names[6] if library is ACCELERATE else "checkpoint-7"
    assert committed(folder) == {last}
    assert [path.name for path in folder.iterdir() if any(path.iterdir())] == [last]


@pytest.mark.parametrize("library", BOTH)
def test_strict_ends_the_training_on_all_ranks(tmp_path: Path, library: Library) -> None:
    first = {"DCP_DATASTATES_FAILPOINTS": "flush.open.before@1=error:ENOSPC"}
    ended = job(library, 2, tmp_path / "strict", tmp_path, first, options={"strict": True})
    for one in ended:
        assert "StorageError" in one.error


def test_the_best_checkpoint_is_kept_and_loaded(tmp_path: Path) -> None:
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # so the first one is the best
        "save_total_limit": 2,
        "max_steps": 8,
    }
    found = train(TRAINER, tmp_path / "best", tmp_path, **settings)
    best = Path(found["best"]).name
    kept = committed(tmp_path / "best")
    assert kept == {best, "checkpoint-8"} or (best == "checkpoint-8" and len(kept) == 2)
    assert found["loaded"] == 21


def test_a_best_step_without_a_checkpoint_is_none(tmp_path: Path) -> None:
    """The loss is greatest after the first step, and every second one is saved."""
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "save_total_limit": 2,
        "max_steps": 6,
    }
    found = train(TRAINER, tmp_path / "best", tmp_path, **settings)
    assert found["best"] is None
    assert committed(tmp_path / "best") == {"checkpoint-4", "checkpoint-6"}


@pytest.mark.parametrize("library", BOTH)
def test_a_checkpoint_of_the_library_itself_loads(tmp_path: Path, library: Library) -> None:
    sharded = {} if library is ACCELERATE else {"state_dict_type": "SHARDED_STATE_DICT"}
    four = {"steps": 4} if library is ACCELERATE else {"max_steps": 4}
    train(library, tmp_path / "stock", tmp_path, stock=True, **four, **sharded)
    losses = []
    for stock in (True, False):
        root = tmp_path / str(stock)
        shutil.copytree(tmp_path / "stock", root)
        resume: Any = True  # the Trainer finds it
        rest: dict[str, Any] = {"save_strategy": "no", **sharded}
        if library is ACCELERATE:
            resume, rest = str(root / "checkpoints" / library.names[4]), {"every": 100}
        found = train(library, root, tmp_path, stock=stock, resume=resume, **rest)
        losses.append(found["losses"])
    assert list(losses[0]) == [5, 6, 7]
    assert losses[0] == losses[1]


def test_options_are_checked_when_the_accelerator_is_made() -> None:
    from dcp_datastates.huggingface import DataStatesAccelerator

    with pytest.raises(ds.ConfigurationError, match="host_cache_size"):
        DataStatesAccelerator(cpu=True, host_cache_size="much")
    with pytest.raises(ds.ConfigurationError, match="strict"):
        DataStatesAccelerator(cpu=True, strict="yes")


def test_a_hook_that_takes_the_weights_gets_them_without_fsdp(tmp_path: Path) -> None:
    """Hooks that save a model by themselves take its weights out of the list."""
    from dcp_datastates.huggingface import DataStatesAccelerator

    accelerator = DataStatesAccelerator(cpu=True, host_cache_size="64MiB")
    accelerator.prepare(torch.nn.Linear(2, 2))
    taken = []
    accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: taken.append(sorted(weights.pop()))
    )
    accelerator.save_state(str(tmp_path / "saved"))
    accelerator.wait_for_saves()
    assert taken == [["bias", "weight"]]


def _accelerator(made: Any, root: Path) -> Any:
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
    assert committed(tmp_path / "out") == {"checkpoint-1", "checkpoint-2"}


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
    assert committed(tmp_path / "half") == {"checkpoint-2", "checkpoint-4"}
    assert found[2] == found[0] != found[1]


def test_a_name_that_cannot_be_installed_is_refused() -> None:
    command = [sys.executable, "-m", "dcp_datastates.huggingface", "--only", "trainr", "x.py"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "choose of accelerate, trainer" in ended.stderr


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


@pytest.mark.parametrize("shape", ["LBFGS", "two models", "a parameter of its own"])
def test_optimizers_of_all_kinds_resume(shape: str, tmp_path: Path) -> None:
    from accelerate.state import AcceleratorState

    from dcp_datastates.huggingface import DataStatesAccelerator

    def run(resume: bool) -> list[torch.Tensor]:
        AcceleratorState._reset_state(True)
        accelerator = DataStatesAccelerator(cpu=True, host_cache_size="64MiB")
        torch.manual_seed(0)
        models = [torch.nn.Linear(4, 4) for _ in range(2 if shape == "two models" else 1)]
        owned = [each for model in models for each in model.parameters()]
        if shape == "a parameter of its own":
            owned.append(torch.nn.Parameter(torch.ones(4)))
        optimizer: Any = (
            torch.optim.LBFGS(owned, max_iter=3) if shape == "LBFGS" else torch.optim.AdamW(owned)
        )
        accelerator.prepare(*models, optimizer)

        def closure() -> Any:
            optimizer.zero_grad()
            x = torch.ones(2, 4)
            for model in models:
                x = model(x)
            extra = owned[-1] if shape == "a parameter of its own" else 0
            loss = (x + extra - 2).square().mean()
            loss.backward()
            return loss

        if resume:
            accelerator.load_state(str(tmp_path / "saved"))
            if shape == "a parameter of its own":
                owned[-1].data = torch.load(tmp_path / "extra")
        else:
            optimizer.step(closure)
            accelerator.save_state(str(tmp_path / "saved"))
            torch.save(owned[-1].data, tmp_path / "extra")
            accelerator.wait_for_saves()
        for _ in range(3):
            optimizer.step(closure)
        return [each.detach().clone() for each in owned]

    assert all(map(torch.equal, run(False), run(True)))


@pytest.mark.parametrize("library", BOTH)
def test_the_training_does_not_wait_for_storage(tmp_path: Path, library: Library) -> None:
    """Storage hangs in the first save, and the training comes to its last one all the same."""
    stuck = {"DCP_DATASTATES_FAILPOINTS": "flush.open.before@1=sleep:600"}
    killing = {"begun": library.names[2]}
    root = tmp_path / "stuck"
    killed(library, root, tmp_path, environment=stuck, kill_after=6, killing=killing, options={})
    assert committed(library.folder(root)) == set()


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


def test_accelerates_stateful_data_loader_goes_on_where_it_was(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    whole = train(ACCELERATE, tmp_path / "jobs", tmp_path, stateful=True)["losses"]
    path = tmp_path / "jobs" / "checkpoints" / ACCELERATE.names[4]
    arguments = {"stateful": True, "resume": str(path), "every": 100}
    resumed = train(ACCELERATE, tmp_path / "jobs", tmp_path, **arguments)
    assert resumed["losses"] == from_step(whole, 5)
