"""``format_of``: which format a checkpoint has, by its content."""

import pytest
import torch
from support.state.checkpoints import save
from support.state.files import flip_bit
from support.state.metadata import decision_of
from support.state.roots import save_stock

from dcp_datastates.checkpoints.inventory import Format, format_of
from dcp_datastates.errors import CheckpointCorruptError, CheckpointNotFoundError


def test_each_format_is_recognized(tmp_path):
    save({"a": torch.ones(3)}, tmp_path / "ours")
    save_stock(tmp_path / "stock")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors.index.json").write_text("{}")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / ".metadata").write_text("what is this")
    (tmp_path / "empty").mkdir()
    names = {
        "ours": Format.DATASTATES,
        "stock": Format.STOCK,
        "hf": Format.HUGGING_FACE,
        "odd": Format.UNKNOWN,
        "empty": Format.NONE,
        "absent": Format.NONE,
    }
    assert {name: format_of(tmp_path / name) for name in names} == names


def test_ours_that_is_damaged_or_not_committed_is_an_error(tmp_path):
    save({"a": torch.ones(3)}, tmp_path / "ours")
    flip_bit(decision_of(tmp_path / "ours"), 700)
    with pytest.raises(CheckpointCorruptError):
        format_of(tmp_path / "ours")
    decision_of(tmp_path / "ours").unlink()
    (tmp_path / "ours" / ".metadata").unlink()
    with pytest.raises(CheckpointNotFoundError, match="not committed"):
        format_of(tmp_path / "ours")
