"""The program of the examples, under torchrun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.commands import ROOT, run, torchrun

PROGRAM = str(ROOT / "examples/lightning_fsdp.py")


def losses(printed: str) -> dict[int, float]:
    """By step, the mean over the ranks."""
    found: dict[int, list[float]] = {}
    for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", printed):
        found.setdefault(int(step), []).append(float(loss))
    return {step: sum(each) / len(each) for step, each in found.items()}


def test_it_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    for folder in (cut, whole):
        folder.mkdir()
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    run(torchrun(2, PROGRAM, 12), cut, **environment)
    resumed = losses(run(torchrun(1, PROGRAM, 14), cut, **environment).stdout)
    expected = losses(run(torchrun(2, PROGRAM, 14), whole, **environment).stdout)
    assert list(resumed) == [11, 12, 13, 14], "it has saved after 10 steps"
    assert list(expected) == list(range(1, 15))
    assert resumed == pytest.approx({step: expected[step] for step in resumed}, rel=1e-4)
