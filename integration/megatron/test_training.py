"""Jobs of the real Megatron-Core: killed, resumed, resharded, with failing saves, and beside its own checkpoints."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from support.jobs.processes import Ended, run_ranks

import dcp_datastates as ds

STEPS = 6
LATE = {"reads": 600.0}
"""No tensor of a save is read before the next backward pass: a save whose job is killed before it is not committed."""

Losses = list[dict[int, str]]


def job(
    function: str,
    world: int,
    tmp_path: Path,
    environment: dict[str, str] | None = None,
    **arguments: Any,
) -> list[Ended]:
    return run_ranks(
        f"megatron_jobs:{function}",
        world,
        tmp_path / "scratch",
        environments=[environment or {}] * world,
        **arguments,
    )


def train(folder: Path, tmp_path: Path, **arguments: Any) -> Losses:
    ended = [each.result() for each in job("train", 2, tmp_path, folder=str(folder), **arguments)]
    assert [each["error"] for each in ended] == ["", ""]
    return [each["losses"] for each in ended]


def killed(folder: Path, tmp_path: Path, **arguments: Any) -> None:
    ended = job("train", 2, tmp_path, folder=str(folder), **LATE, **arguments)
    assert all(each.killed for each in ended), ended[0].error + ended[0].log


def tracked(folder: Path) -> str:
    return (folder / "latest_checkpointed_iteration.txt").read_text()


def complete(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob("*/metadata.json")}


@pytest.mark.parametrize(
    "layout", [{"tp": 1, "wraps": True}, {"tp": 2}], ids=["data parallel", "tensor parallel"]
)
def test_a_killed_job_goes_on_from_the_newest_commit_with_equal_losses(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole", tmp_path, **LATE, **layout)
    assert complete(tmp_path / "whole") == {"2", "4", "6"}

    folder = tmp_path / "killed"
    killed(folder, tmp_path, kill=4, **layout)
    assert complete(folder) == {tracked(folder)} == {"2"}
    assert (folder / "4" / "common.pt").exists()
    with pytest.raises(ds.errors.CheckpointNotFoundError):
        ds.load(folder / "4")

    resumed = train(folder, tmp_path, **layout)
    assert [list(rank) for rank in resumed] == [[3, 4, 5, 6]] * 2
    for before, after in zip(whole, resumed, strict=True):
        assert after == {step: before[step] for step in after}
    assert complete(folder) == {"2", "4", "6"}
    assert not ds.verify(folder / "4").damages


def test_at_another_number_of_ranks_it_loads_what_megatrons_own_loads(tmp_path: Path) -> None:
    """Also after ``convert`` to DCP's format, which Megatron without this package reads, and from it."""
    for each in job("save_both", 2, tmp_path, folder=str(tmp_path)):
        each.result()
    ds.convert(tmp_path / "ours", tmp_path / "to stock", "dcp")
    ds.convert(tmp_path / "stock", tmp_path / "to ours", allow_objects=True)
    for name in ("common.pt", "metadata.json"):
        shutil.copy(tmp_path / "ours" / name, tmp_path / "to stock")
        shutil.copy(tmp_path / "stock" / name, tmp_path / "to ours")
    names = ["stock", "ours", "to stock", "to ours"]
    for world in (1, 2):
        for each in job("compare", world, tmp_path, folder=str(tmp_path), names=names):
            found = each.result()
            assert found["different"] == [([], [], [])] * 4
            assert found["strict"] == [found["strict"][0]] * 4
            assert {type(each) for each in found["strict"][0].values()} == {str, list}
            assert found["filled"] > found["padding"] == 0

    for each in job("load_without_package", 1, tmp_path, folder=str(tmp_path / "ours")):
        assert "dcp-datastates convert PATH OUT --to dcp" in each.error


def test_training_and_finalization_do_not_wait_for_storage(tmp_path: Path) -> None:
    """Storage hangs in the first save, and the training comes to its last step all the same."""
    stuck = {"DCP_DATASTATES_FAILPOINTS": "flush.open.before@1=sleep:600"}
    folder = tmp_path / "stuck"
    arguments: dict[str, Any] = {"kill": STEPS, "final": False, "environment": stuck}
    ended = job("train", 2, tmp_path, folder=str(folder), **arguments)
    assert all(each.killed for each in ended), ended[0].error + ended[0].log
    assert complete(folder) == set()


def test_a_failed_save_raises_on_all_ranks_and_is_no_checkpoint(tmp_path: Path) -> None:
    second = {"DCP_DATASTATES_FAILPOINTS": "flush.open.before@2=error:ENOSPC"}
    folder = tmp_path / "failed"
    ended = job("train", 2, tmp_path, second, folder=str(folder))
    for each in ended:
        assert "No space left on device" in each.result()["error"]
    assert complete(folder) <= {"2"}


def test_a_checkpoint_that_is_being_replaced_is_not_complete(tmp_path: Path) -> None:
    found = job("replace", 1, tmp_path, folder=str(tmp_path / "c"), options=LATE)[0].result()
    assert found == {"complete": [True, False, True], "values": [1.0, 2.0]}


def test_megatron_chooses_the_strategy_which_stores_main_replicas(tmp_path: Path) -> None:
    for each in job("choose_by_format", 2, tmp_path, folder=str(tmp_path / "c")):
        assert each.result() == {
            "chosen": ["TorchDistSaveShardedStrategy", "DataStatesSaveStrategy"],
            "stored": [1.0],
        }
    assert not ds.verify(tmp_path / "c").damages


def test_options_are_checked_when_the_strategy_is_made() -> None:
    from dcp_datastates.megatron import DataStatesSaveStrategy, use_by_default

    for made in (DataStatesSaveStrategy, use_by_default):
        with pytest.raises(ds.errors.ConfigurationError, match="host_cache_size"):
            made(host_cache_size="much")
        with pytest.raises(ds.errors.ConfigurationError, match="did you mean 'exit_timeout'"):
            made(exit_timout=1.0)
        with pytest.raises(ds.errors.ConfigurationError, match="has no option 'no_dist'"):
            made(no_dist=True)


def test_without_megatron_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dcp_datastates.megatron", raising=False)
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ImportError, match=r"pip install 'megatron-core>=0\.16,<0\.17'"):
        importlib.import_module("dcp_datastates.megatron")


@pytest.mark.parametrize("given", ["msc://profile/run", "s3://bucket/run", Path("s3://bucket/run")])
def test_a_url_is_refused_by_name(
    given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dcp_datastates.megatron import DataStatesSaveStrategy

    monkeypatch.chdir(tmp_path)
    for save in (DataStatesSaveStrategy().save, DataStatesSaveStrategy().async_save):
        with pytest.raises(ds.errors.ConfigurationError, match=r"checkpoint_dir='.*:/"):
            save({}, given)
    assert list(tmp_path.iterdir()) == []
