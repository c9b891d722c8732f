"""Small checkpoints in ``tests/data``, each written with another torch, that every torch must load.

To add those of the torch at hand: ``PYTHONPATH=.:tests python -m support.state.written``, in the repository.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import dcp_datastates

_DATA = Path(__file__).parents[2] / "data"
CHECKPOINTS = tuple(sorted(_DATA.glob("torch-*")))
"""``torch-VERSION-HOW``: planned by this package, or by DCP's default planner."""


def expected_state() -> dict[str, Any]:
    """What is in all of them."""
    return {
        "weight": torch.arange(24.0).reshape(4, 6).t(),
        "half": torch.arange(5).to(torch.bfloat16),
        "optimizer": {"steps": [torch.tensor(7), torch.tensor([1, 2], dtype=torch.uint8)]},
        "epoch": 3,
        "name": "a name",
    }


def empty_state() -> dict[str, Any]:
    """The same with other values."""
    state = expected_state()
    steps = [torch.zeros_like(each) for each in state["optimizer"]["steps"]]
    return {
        "weight": torch.zeros(6, 4),
        "half": torch.zeros_like(state["half"]),
        "optimizer": {"steps": steps},
        "epoch": 0,
        "name": "",
    }


def _write() -> None:
    version = re.sub(r"\+.*", "", torch.__version__)
    for how, planner in {"own": dcp_datastates.DataStatesSavePlanner(), "stock": None}.items():
        name = f"torch-{version}-{how}"
        with (
            tempfile.TemporaryDirectory() as elsewhere
        ):  # a checkpoint names the path it was saved to
            writer = dcp_datastates.DataStatesWriter(f"{elsewhere}/{name}")
            dcp.save(expected_state(), storage_writer=writer, planner=planner)
            shutil.rmtree(_DATA / name, ignore_errors=True)
            shutil.copytree(f"{elsewhere}/{name}", _DATA / name)


if __name__ == "__main__":
    _write()
