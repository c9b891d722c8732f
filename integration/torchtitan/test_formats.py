"""Other formats: torchtitan's own saves and loads go on working, in both directions."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from compare import assert_same, tensors_of
from dcp_datastates import DataStatesReader, convert
from jobs import Launcher, Mesh, Trial
from test_training import FSDP, STEPS, StockJob, step


def test_a_job_moves_from_stock_checkpoints_to_these_and_back(
    launcher: Launcher, stock_job: StockJob, tmp_path: Path
) -> None:
    """Two steps of one save by torchtitan, two by this package, two by torchtitan again."""
    ours = tmp_path / "ours"
    stock, expected = stock_job(FSDP)
    (ours / "checkpoint").mkdir(parents=True)
    shutil.copytree(step(stock, 1), step(ours, 1))
    keep = ("--checkpoint.keep_latest_k=2",)
    guard = "hooks:no_collective_on_default_group"
    found = launcher.run(Trial(ours, FSDP, STEPS, flags=keep, hook=guard)).check()
    assert found.losses == {number: expected[number] for number in (2, 3, 4)}
    for number in (3, 4):
        assert_same(step(stock, number), step(ours, number))
    # When step 3 was saved, step 2 alone was committed: the stock one had to stay. After the last step it goes.
    assert sorted(path.name for path in step(ours, 1).parent.iterdir()) == ["step-3", "step-4"]

    back = tmp_path / "back"
    convert(step(ours, 3), step(back, 3), "dcp")
    assert_same_stock(step(stock, 3), step(back, 3))
    again = launcher.run(Trial(back, FSDP, STEPS, "disabled", stock=True)).check().losses
    assert again == {4: expected[4]}
    assert_same_stock(step(stock, 4), step(back, 4))


def assert_same_stock(one: Path, other: Path) -> None:
    expected, found = (tensors_of(FileSystemReader(str(path))) for path in (one, other))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_last_save_may_be_the_model_alone_or_in_hugging_face_format(
    launcher: Launcher, tmp_path: Path
) -> None:
    """And both are what a job can begin with."""
    last = ("--checkpoint.last_save_model_only", "--checkpoint.export_dtype=bfloat16")
    one = tmp_path / "one"
    launcher.run(Trial(one, FSDP, 2, "async_with_pinned_mem", flags=last)).check()
    whole = tensors_of(DataStatesReader(step(one, 1)))
    model = tensors_of(DataStatesReader(step(one, 2)))
    assert model.keys() == {name for name in whole if not name.startswith("optimizer")}
    assert {tensor.dtype for tensor in model.values()} == {torch.bfloat16}

    two = tmp_path / "two"
    hf = (*last, "--checkpoint.last_save_in_hf", f"--checkpoint.initial_load_path={step(one, 2)}")
    launcher.run(Trial(two, Mesh(), 1, "async", flags=hf)).check()
    written = load_file(next(step(two, 1).glob("*.safetensors")))
    assert written["model.embed_tokens.weight"].dtype == torch.bfloat16

    begin = (f"--checkpoint.initial_load_path={step(two, 1)}", "--checkpoint.initial_load_in_hf")
    three = launcher.run(Trial(tmp_path / "three", FSDP, 1, "async", flags=begin)).check()
    stock = launcher.run(
        Trial(tmp_path / "four", FSDP, 1, "async", stock=True, flags=begin)
    ).check()
    assert three.losses == stock.losses
