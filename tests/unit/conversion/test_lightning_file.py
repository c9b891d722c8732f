"""What Lightning has saved, as the file from which it resumes. (``integration/lightning`` asks Lightning itself.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_datastates as ds
from dcp_datastates.conversion.lightning_file import COUNT, FURTHER_TENSORS, META, NAMES
from dcp_datastates.manager.frameworks import state_of, with_files
from dcp_datastates.planning.column_planning import serialize

META_OF_LIGHTNING = {
    "epoch": 1,
    "pytorch-lightning_version": "2.6.6",
    "loops": {"fit_loop": {"state_dict": {}}},
    "callbacks": {"ModelCheckpoint": {"best": torch.tensor(0.25), "of": {}}},
    "hyper_parameters": {"table": {0: "a", 1: ["b", {}]}},
    "lr_schedulers": [],
}


def saved(path: Path, **more: Any) -> dict[str, Any]:
    """Save as the strategies do; returns what Lightning's own file has."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = state_of({"state_dict": model, "optimizer": optimizer})["optimizer"]
    meta = {**META_OF_LIGHTNING, **more}
    own = {NAMES: {"weight": "_orig_mod.weight"}, COUNT: 1, FURTHER_TENSORS: ["average"]}
    whole = {
        "state_dict": model.state_dict(),
        "optimizer_0": state,
        "average": {"weight": torch.ones(2)},
    }
    ds.save(with_files(whole, {META: serialize({**meta, **own})}), path)
    weights = {"_orig_mod.weight": model.weight, "bias": model.bias}
    return {
        **meta,
        "average": whole["average"],
        "state_dict": weights,
        "optimizer_states": [optimizer.state_dict()],
    }


def test_it_is_the_file_of_lightnings_own_strategies(tmp_path: Path) -> None:
    expected = saved(tmp_path / "x.ckpt")
    ds.convert(tmp_path / "x.ckpt", tmp_path / "y.ckpt", "torch")
    found = torch.load(tmp_path / "y.ckpt")
    assert found.keys() == expected.keys()
    assert repr(found["hyper_parameters"]) == repr(expected["hyper_parameters"])
    for name in ("loops", "callbacks"):
        assert repr(found[name]) == repr(expected[name])
    for name in ("state_dict", "average"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)
    (one,), (other,) = found["optimizer_states"], expected["optimizer_states"]
    assert repr(one) == repr(other)


def test_a_choice_takes_the_values_as_they_are_stored(tmp_path: Path) -> None:
    saved(tmp_path / "x.ckpt")
    ds.convert(tmp_path / "x.ckpt", tmp_path / "y.pt", "torch", part="state_dict")
    assert torch.load(tmp_path / "y.pt").keys() == {"weight", "bias"}


def test_a_rename_is_one_of_the_model(tmp_path: Path) -> None:
    saved(tmp_path / "x.ckpt")
    rename = {"state_dict.": "state_dict.net."}
    ds.convert(tmp_path / "x.ckpt", tmp_path / "y.pt", "torch", rename=rename)
    assert torch.load(tmp_path / "y.pt")["state_dict"].keys() == {"net.weight", "net.bias"}


def test_weights_alone_have_no_optimizers(tmp_path: Path) -> None:
    saved(tmp_path / "x.ckpt")
    ds.convert(tmp_path / "x.ckpt", tmp_path / "y.pt", "torch", exclude="optimizer_0")
    assert torch.load(tmp_path / "y.pt")["optimizer_states"] == [{}]


class Unknown:
    """No class that torch knows."""


def test_objects_of_unknown_classes_need_trust(tmp_path: Path) -> None:
    saved(tmp_path / "x.ckpt", mine=Unknown())
    with pytest.raises(ds.errors.UnsafeObjectError, match="allow-objects"):
        ds.convert(tmp_path / "x.ckpt", tmp_path / "y.pt", "torch")
    ds.convert(tmp_path / "x.ckpt", tmp_path / "y.pt", "torch", allow_objects=True)
    found = torch.load(tmp_path / "y.pt", weights_only=False)
    assert type(found["mine"]) is Unknown
