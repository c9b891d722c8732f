"""What stock DCP says to a checkpoint of this package: what loads it, instead of advice that does not help."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.state.checkpoints import assert_same, raises, save
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dcp_datastates import DataStatesSavePlanner, convert


def _state():
    return {"model": {"w": torch.arange(30.0)}, "step": 7}


@pytest.mark.parametrize("planner", [None, DataStatesSavePlanner])
@pytest.mark.parametrize("wanted", [{"model": {"w": torch.zeros(30)}}, {"step": 0}])
def test_the_stock_reader_says_what_loads_it(planner, wanted, tmp_path):
    save(_state(), tmp_path, planner=planner and planner())
    with raises(ValueError, "dcp_datastates.load(path)", "DataStatesReader(path)"):
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)


def test_converting_to_torch_save_says_what_converts_it_and_that_does(tmp_path):
    save(_state(), tmp_path / "c")
    with raises(ValueError, "`dcp-datastates convert PATH OUT --to dcp`"):
        dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    convert(tmp_path / "c", tmp_path / "stock", "dcp")
    dcp_to_torch_save(tmp_path / "stock", tmp_path / "c.pt")
    assert_same(torch.load(tmp_path / "c.pt", weights_only=True), _state())
