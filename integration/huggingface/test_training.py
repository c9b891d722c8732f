"""Jobs of the real Accelerate and the real Trainer on ranks: killed, resumed, and with failing saves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from support.jobs.processes import Ended, run_ranks
from support.state.files import flip_bit
from support.stores.server import BUCKET, endpoint, use

import dcp_datastates as ds
from dcp_datastates.huggingface.resuming import Resumption

STEPS = 7
LATE = {"reads": 600.0}
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


@pytest.mark.parametrize("file", ["r00000", "r00001"])
def test_all_ranks_leave_out_a_checkpoint_of_which_one_cannot_load_its_part(
    tmp_path: Path, whole: Any, file: str
) -> None:
    folder, losses = whole(TRAINER)
    shutil.copytree(folder, tmp_path / "run")
    (data,) = (tmp_path / "run" / "checkpoint-7").glob(f"*/{file}-*.safetensors")
    flip_bit(data, data.stat().st_size // 2)
    resumed = train(TRAINER, tmp_path / "run", tmp_path, resume=True)
    assert resumed["losses"] == from_step(losses, 7)


def test_the_trainer_with_ddp(tmp_path: Path) -> None:
    settings = {"fsdp": False, "max_steps": 5}
    losses = train(TRAINER, tmp_path / "whole", tmp_path, **settings)["losses"]
    killing = {"begun": "checkpoint-4", "committed": "checkpoint-2"}
    killed(TRAINER, tmp_path / "killed", tmp_path, kill_after=4, killing=killing, **settings)
    resumed = train(TRAINER, tmp_path / "killed", tmp_path, resume=True, **settings)
    assert resumed["losses"] == from_step(losses, 3)


@pytest.mark.parametrize("fsdp", [True, False], ids=["fsdp", "ddp"])
def test_an_optimizer_that_does_not_fit_on_one_rank_leaves_the_model_of_all_as_it_is(
    tmp_path: Path, fsdp: bool
) -> None:
    train(TRAINER, tmp_path, tmp_path, fsdp=fsdp, max_steps=2)
    for one in job(TRAINER, 2, tmp_path, tmp_path, fsdp=fsdp, resume=True, refused=True):
        found = one.result()
        assert "is that of AdamW" in found["error"]
        assert found["same"]


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
                "ValueError: No valid checkpoint found in output directory" in one.error
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
    assert [path.name for path in folder.iterdir() if path.is_dir() and any(path.iterdir())] == [
        last
    ]


@pytest.mark.parametrize("library", BOTH)
def test_one_failure_ends_the_training_on_all_ranks(tmp_path: Path, library: Library) -> None:
    first = {"DCP_DATASTATES_FAILPOINTS": "flush.open.before@1=error:ENOSPC"}
    ended = job(library, 2, tmp_path / "ended", tmp_path, first, options={"max_failures": 1})
    for one in ended:
        assert "No space left on device" in one.error, (
            "of this rank, or of the other one, which was first"
        )


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


@pytest.mark.parametrize("library", BOTH)
def test_the_training_does_not_wait_for_storage(tmp_path: Path, library: Library) -> None:
    """Storage hangs in the first save, and the training comes to its last one all the same."""
    stuck = {"DCP_DATASTATES_FAILPOINTS": "flush.open.before@1=sleep:600"}
    killing = {"begun": library.names[2]}
    root = tmp_path / "stuck"
    killed(library, root, tmp_path, environment=stuck, kill_after=6, killing=killing, options={})
    assert committed(library.folder(root)) == set()


def test_accelerates_stateful_data_loader_goes_on_where_it_was(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    whole = train(ACCELERATE, tmp_path / "jobs", tmp_path, stateful=True)["losses"]
    path = tmp_path / "jobs" / "checkpoints" / ACCELERATE.names[4]
    arguments = {"stateful": True, "resume": str(path), "every": 100}
    resumed = train(ACCELERATE, tmp_path / "jobs", tmp_path, **arguments)
    assert resumed["losses"] == from_step(whole, 5)


def test_the_trainer_goes_on_from_a_checkpoint_in_a_store(tmp_path: Path) -> None:
    settings = {"fsdp": False, "max_steps": 4}
    losses = train(TRAINER, tmp_path / "whole", tmp_path, **settings)["losses"]
    use(endpoint())
    url = f"s3://{BUCKET}/{tmp_path.parent.name}/{tmp_path.name}/checkpoint-2"
    ds.copy(tmp_path / "whole" / "checkpoint-2", url)
    newest = ds.latest(url.rpartition("/")[0])  # an object, no string
    assert Resumption(newest, "job").next() == (url, True)
    store = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    resumed = train(
        TRAINER, tmp_path / "other", tmp_path, resume=url, environment=store, **settings
    )
    assert resumed["losses"] == from_step(losses, 3)
