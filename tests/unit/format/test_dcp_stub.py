"""The pickle in ``.metadata``: what programs that know DCP only are told of a checkpoint."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.state.checkpoints import save
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dcp_datastates import DataStatesSavePlanner

REFUSAL = re.compile(
    r"this is a checkpoint of dcp_datastates: .*load\(\).*DataStatesReader\(PATH\).*"
    r"`dcp-datastates convert PATH OUT --to dcp`"
)


@pytest.mark.parametrize("planner", [None, DataStatesSavePlanner])
def test_stock_dcp_refuses_it_and_says_what_to_do(planner, tmp_path) -> None:
    state = {"w": torch.arange(12.0).reshape(3, 4), "n": {"step": 3, "empty": torch.empty(0)}}
    save(state, tmp_path, planner=planner and planner())
    for state in ({"w": torch.zeros(3, 4)}, {"n": {"step": 0}}):
        with pytest.raises(CheckpointException, match=REFUSAL):
            dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path))
    with pytest.raises(CheckpointException, match=REFUSAL):
        dcp_to_torch_save(tmp_path, tmp_path / "c.pt")


def test_it_is_the_same_for_every_checkpoint(tmp_path) -> None:
    for name, state in (("a", {"w": torch.zeros(3)}), ("b", {"x": torch.zeros(4), "n": 1})):
        save(state, tmp_path / name)
    first, second = ((tmp_path / name / ".metadata").read_bytes() for name in "ab")
    length = first.index(b"Metadata\n.") + len(b"Metadata\n.")
    assert first[:length] == second[:length]
    with pytest.raises(ModuleNotFoundError, match=REFUSAL):
        pickle.loads(first)
