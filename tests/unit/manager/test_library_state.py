"""What a framework saves and loads: models and optimizers by name, in two calls, and the files of each rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dcp_datastates as ds
from dcp_datastates.manager.frameworks import files_from, load_parts, state_of, with_files


def program(*names: str, seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose layers have these names, and its optimizer, after a step."""
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in names})
    optimizer = torch.optim.AdamW(model.parameters())
    sum(layer(torch.rand(2, 3)).square().sum() for layer in model.values()).backward()
    optimizer.step()
    return model, optimizer


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each["exp_avg"] for each in optimizer.state.values()]


@pytest.mark.parametrize("name", ["one", "renamed"])
def test_models_and_optimizers_come_back_in_separate_calls(name: str, tmp_path: Path) -> None:
    model, optimizer = program("one", "two")
    state = state_of({"model": model, "optimizer": optimizer})
    assert state["model"]["one.weight"].data_ptr() == model["one"].weight.data_ptr(), "no copy"
    ds.save(with_files(state, {"a.json": b"{}"}), tmp_path / "x")
    other, other_optimizer = program(name, "two", seed=1)
    parts = {"model": other, "optimizer": other_optimizer}
    options = {"rename": {"model.one.": f"model.{name}."}}
    load_parts(tmp_path / "x", {"model": other}, ["model"], **options)
    assert torch.equal(other[name].weight, model["one"].weight)
    assert not torch.equal(moments(other_optimizer)[0], moments(optimizer)[0])
    load_parts(tmp_path / "x", parts, ["optimizer"], **options)
    for mine, theirs in zip(moments(other_optimizer), moments(optimizer), strict=True):
        assert torch.equal(mine, theirs)
    assert files_from(tmp_path / "x") == {"a.json": b"{}"}


def test_the_state_of_an_optimizer_may_be_asked_for_alone() -> None:
    model, optimizer = program("one")
    parts = {"model": model, "optimizer": optimizer}
    assert state_of(parts, ["optimizer"]).keys() == {"optimizer"}
    assert "one.weight" in state_of(parts, ["optimizer"])["optimizer"]["state"]


def test_what_is_not_stored_is_an_error_unless_it_may_be_missing(tmp_path: Path) -> None:
    model, optimizer = program("one")
    ds.save(state_of({"model": model}), tmp_path / "x")
    parts = {"model": model, "optimizer": optimizer, "empty": torch.nn.Identity()}
    before = [each.clone() for each in moments(optimizer)]
    with pytest.raises(ds.IncompatibleStateError, match="optimizer"):
        load_parts(tmp_path / "x", parts, ["optimizer"])
    load_parts(tmp_path / "x", parts, ["optimizer", "empty"], missing="warn")
    assert all(map(torch.equal, moments(optimizer), before))
    load_parts(tmp_path / "x", parts, ["model", "empty"])


def test_a_renamed_optimizer_is_found_where_things_may_be_missing(tmp_path: Path) -> None:
    model, optimizer = program("one")
    ds.save(state_of({"model": model, "old": optimizer}), tmp_path / "x")
    other, fresh = program("one", seed=1)
    parts = {"model": other, "optimizer": fresh}
    options = {"rename": {"old.": "optimizer."}, "missing": "warn"}
    load_parts(tmp_path / "x", parts, ["optimizer"], **options)
    assert all(map(torch.equal, moments(fresh), moments(optimizer)))
