"""Jobs of the real Lightning on two ranks: killed, resumed, and with failing saves."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch.core.saving as saving
import pytest
import torch
from support.stores.server import BUCKET, endpoint, use

import dcp_datastates as ds
from dcp_datastates.lightning import (
    DataStatesFSDPStrategy,
    DataStatesModelParallelStrategy,
    callback,
)
from lightning_launch import from_step, job

STEPS = 7
LATE = {"reads": 600.0}
"""No tensor of a save is read before the next backward pass: a save whose job is killed before it is not committed."""


def train(folder: Path, tmp_path: Path, world: int = 2, **arguments: Any) -> dict[str, Any]:
    ranks = [one.result() for one in job("train", world, tmp_path, folder=str(folder), **arguments)]
    return ranks[0]


def name(number: int) -> str:
    return f"step={number}.ckpt"


def killed(folder: Path, tmp_path: Path, **arguments: Any) -> None:
    """Train until the ranks kill themselves."""
    arguments = {"options": LATE, **arguments}
    ended = job("train", 2, tmp_path, folder=str(folder), **arguments)
    assert [one.exit_code for one in ended] == [-9, -9], ended[0].log


def committed(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.ckpt") if (path / ".metadata").exists()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[int, str]]]:
    """A job that nothing interrupted: its checkpoints, and its losses by step."""
    folder = tmp_path_factory.mktemp("whole")
    found = train(folder, tmp_path_factory.mktemp("scratch"), options=LATE)
    assert list(found["losses"]) == list(range(1, STEPS + 1))
    # Forward and backward come before the optimizer's step, where the gate waits for the reads.
    assert found["events"] == ["backward", "step"] * STEPS
    yield folder, found["losses"]
    shutil.rmtree(folder)


def test_a_killed_job_goes_on_from_the_newest_commit_with_equal_losses(
    tmp_path: Path, whole: tuple[Path, dict[int, str]]
) -> None:
    folder = tmp_path / "killed"
    killed(folder, tmp_path, kill={"step": 6, "begun": name(6), "committed": name(4)})
    assert committed(folder) == {name(2), name(4)}
    resumed = train(folder, tmp_path, resume="newest")
    assert resumed["losses"] == from_step(whole[1], 5)
    # Lightning never writes over what an earlier job left.
    assert committed(folder) == {name(2), name(4), "step=6-v1.ckpt"}
    for found in committed(folder):
        assert not ds.verify(folder / found).damages


def test_fsdp1(tmp_path: Path) -> None:
    folder, other = tmp_path / "killed", tmp_path / "whole"
    losses = train(other, tmp_path, kind="fsdp1")["losses"]
    kill = {"step": 6, "begun": name(6), "committed": name(4)}
    # FSDP1 gathers new tensors for a save, which need no later reads: storage must hold the third save up.
    stuck = {"DCP_DATASTATES_FAILPOINTS": "flush.open.before@3=sleep:600"}
    killed(folder, tmp_path, kind="fsdp1", kill=kill, environment=stuck)
    assert train(folder, tmp_path, kind="fsdp1", resume="newest")["losses"] == from_step(losses, 5)
    # The parameters have the same names as with FSDP2.
    ended = job("resume_from", 2, tmp_path, folder=str(tmp_path), path=str(other / name(2)))
    assert all(len(one.result()["same"]) == 4 for one in ended)


def test_ddp(tmp_path: Path) -> None:
    """With the average of weights, which Lightning exchanges for the model's when it saves."""
    settings = {"kind": "ddp", "average": True}
    found = train(tmp_path / "whole", tmp_path, **settings)
    folder = tmp_path / "killed"
    killed(folder, tmp_path, kill={"step": 6, "begun": name(6), "committed": name(4)}, **settings)
    resumed = train(folder, tmp_path, resume="newest", **settings)
    assert resumed["losses"] == from_step(found["losses"], 5)
    assert resumed["weights"] == found["weights"], (
        "the averages, which are the model's after the training"
    )
    stored = ds.load(tmp_path / "whole" / name(4))
    assert stored["current_model_state"].keys() == stored["state_dict"].keys()


def test_one_device(tmp_path: Path) -> None:
    settings = {"kind": "single", "world": 1}
    losses = train(tmp_path / "whole", tmp_path, **settings)["losses"]
    resumed = train(
        tmp_path / "other", tmp_path, resume=str(tmp_path / "whole" / name(4)), **settings
    )
    assert resumed["losses"] == from_step(losses, 5)


@pytest.mark.parametrize(("saved", "loaded"), [("ddp", "fsdp2"), ("fsdp2", "ddp")])
def test_a_job_may_change_its_strategy(tmp_path: Path, saved: str, loaded: str) -> None:
    train(tmp_path / "first", tmp_path, kind=saved, steps=2)
    path = str(tmp_path / "first" / name(2))
    arguments = {"folder": str(tmp_path / "second"), "path": path, "kind": loaded}
    for one in job("resume_from", 2, tmp_path, **arguments):
        assert len(one.result()["same"]) == 4
        assert list(one.result()["losses"]) == [3, 4, 5]


def test_load_from_checkpoint_reads_a_file_made_of_a_checkpoint(
    tmp_path: Path, whole: tuple[Path, dict[int, str]]
) -> None:
    from lightning_jobs import Tiny

    torch.save(saving.pl_load(whole[0] / name(4), weights_only=False), tmp_path / "file.ckpt")
    module = Tiny.load_from_checkpoint(tmp_path / "file.ckpt", strict=False, weights_only=False)
    assert module.hparams["dropout"] == 0.1
    stored = torch.load(tmp_path / "file.ckpt", weights_only=False)
    assert stored["state_dict"].keys() == {
        f"layers.{n}.{part}" for n in (0, 1) for part in ("weight", "bias")
    }
    assert stored["global_step"] == 4


def test_last_is_the_last_commit_and_a_save_that_was_not_committed_is_not_resumed_from(
    tmp_path: Path, whole: tuple[Path, dict[int, str]]
) -> None:
    folder = tmp_path / "last"
    last = {"save_top_k": 0, "save_last": True, "resume": "last"}
    killed(folder, tmp_path, kill={"step": 2, "begun": "last.ckpt"}, **last)
    assert committed(folder) == set()
    for one in job("resume_from", 2, tmp_path, folder=str(folder), path=str(folder / "last.ckpt")):
        assert "CheckpointNotFoundError" in one.error

    # The next job begins from the start, and is killed with a save in flight that replaces a committed one.
    again = "last-v1.ckpt"  # Lightning never writes over what an earlier job left
    kill = {"step": 4, "begun": again, "attempts": 2, "committed": again}
    killed(folder, tmp_path, kill=kill, **last)
    assert train(folder, tmp_path, **last)["losses"] == from_step(whole[1], 3)


@pytest.mark.parametrize("world", [1, 3])
def test_at_another_world_size(
    tmp_path: Path, whole: tuple[Path, dict[int, str]], world: int
) -> None:
    path = whole[0] / name(4)
    for one in job("resume_from", world, tmp_path, folder=str(tmp_path), path=str(path)):
        found = one.result()
        assert len(found["same"]) == 4
        assert list(found["losses"]) == [5]


def test_a_failed_save_does_not_end_the_training_and_evicts_nothing(
    tmp_path: Path, whole: tuple[Path, dict[int, str]]
) -> None:
    second = {"DCP_DATASTATES_FAILPOINTS": "flush.open.before@2=error:ENOSPC"}
    folder = tmp_path / "killed"
    kill = {"step": 6, "begun": name(6), "committed": name(2)}
    killed(folder, tmp_path, environment=second, save_top_k=1, kill=kill)
    assert committed(folder) == {name(2)}

    folder = tmp_path / "unharmed"
    found = train(folder, tmp_path, environment=second, save_top_k=1)
    assert found["losses"] == whole[1]
    assert [path.name for path in folder.iterdir() if path.is_dir()] == [name(6)]
    assert committed(folder) == {name(6)}


def test_strict_ends_the_training_on_all_ranks(tmp_path: Path) -> None:
    first = {"DCP_DATASTATES_FAILPOINTS": "flush.open.before@1=error:ENOSPC"}
    ended = job(
        "train", 2, tmp_path, first, folder=str(tmp_path / "ended"), options={"max_failures": 1}
    )
    for one in ended:
        assert "StorageError" in one.error


def test_a_checkpoint_of_lightning_itself_loads(tmp_path: Path) -> None:
    for one in job("save_stock", 2, tmp_path, folder=str(tmp_path / "stock"), kind="stock"):
        one.result()
    path = str(tmp_path / "stock" / name(3))
    losses = []
    for kind in ("stock", "fsdp2"):
        ended = job("resume_from", 2, tmp_path, folder=str(tmp_path), path=path, kind=kind)
        losses.append([one.result()["losses"] for one in ended])
    assert list(losses[0][0]) == [4, 5]
    assert losses[0] == losses[1]


def test_options_are_checked_when_the_strategy_is_made() -> None:
    for made in (DataStatesModelParallelStrategy, DataStatesFSDPStrategy):
        with pytest.raises(ds.errors.ConfigurationError, match="host_cache_size"):
            made(host_cache_size="much")
    with pytest.raises(ds.errors.ConfigurationError, match="save_distributed_checkpoint"):
        DataStatesModelParallelStrategy(save_distributed_checkpoint=False)
    with pytest.raises(ds.errors.ConfigurationError, match="state_dict_type"):
        DataStatesFSDPStrategy(state_dict_type="full")


def test_the_training_does_not_wait_for_storage(tmp_path: Path) -> None:
    """Storage hangs in the first save, and the training comes to its last step all the same."""
    stuck = {"DCP_DATASTATES_FAILPOINTS": "flush.open.before@1=sleep:600"}
    folder = tmp_path / "stuck"
    killed(folder, tmp_path, environment=stuck, kill={"step": STEPS, "begun": name(2)}, options={})
    assert committed(folder) == set()


def test_without_lightning_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dcp_datastates.lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning>=2\.6,<2\.7'"):
        importlib.import_module("dcp_datastates.lightning")


def test_checkpoints_in_a_store_are_saved_deleted_and_resumed_from(tmp_path: Path) -> None:
    use(endpoint())
    store = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    root = f"s3://{BUCKET}/{tmp_path.parent.name}/{tmp_path.name}"
    folder = tmp_path / "job"
    folder.mkdir()
    (ended,) = job("in_stores", 1, tmp_path, environment=store, folder=str(folder), root=root)
    found = ended.result()
    assert found["names"] == [name(6), name(4)]
    assert found["newest"] == f"memory://run/{name(6)}"
    whole, resumed, further = found["losses"]
    assert resumed == from_step(whole, 5)
    assert list(further) == [8]
    assert "ckpt_path=str(dcp_datastates.latest('memory://run'))" in found["last"]
    assert found["local"] == []
    assert [each.name for each in ds.inspect(root).checkpoints] == ["step-7"]


def test_a_last_checkpoint_that_storage_does_not_show_is_not_left_out(tmp_path, monkeypatch):
    """The training would start from the beginning."""
    (tmp_path / "last.ckpt").mkdir()

    def refuse(path, *more, **named):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(ds.errors.StorageError, match="Permission denied"):
        callback._may_be_loaded(str(tmp_path / "last.ckpt"))
    monkeypatch.undo()
    assert not callback._may_be_loaded(str(tmp_path / "last.ckpt"))
