"""The recipe for Ray Train: a worker is killed with a save in flight, and Ray's restart goes on with equal losses."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from support.commands import ROOT, started
from support.jobs.scripts import ranks_of_torchrun, run_script

pytest.importorskip("ray.train")

WITHOUT_RAY = """
os.chdir(path)
import types
import ray.train.torch
import torch.distributed as dist
dist.init_process_group("gloo")
ray.train.report = lambda *_, **__: None
ray.train.get_context = lambda: types.SimpleNamespace(get_world_rank=dist.get_rank)
ray.train.torch.prepare_model = torch.nn.parallel.DistributedDataParallel
{program}
train()
"""


def losses(output: str) -> set[tuple[str, str]]:
    """The losses that were printed, each with its step."""
    return set(re.findall(r"step (\d+): loss (\S+)", output))


@pytest.mark.timeout(420)
def test_a_restart_by_ray_goes_on_from_the_newest_commit(tmp_path: Path) -> None:
    text = (ROOT / "examples/ray_train.py").read_text()
    (tmp_path / "train.py").write_text(text)
    environment = {
        # The coordinator is killed at its fourth commit; the restarted one has only three to make.
        "DCP_DATASTATES_FAILPOINTS": "publish.link.before@4=kill",
        "HOME": str(tmp_path),  # Ray writes a token there
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with started([sys.executable, "train.py"], tmp_path, **environment) as process:
        output, errors = process.communicate(timeout=360)
    assert process.returncode == 0, errors[-5000:]
    steps = tmp_path / "storage" / "run-1" / "steps"
    assert f"ended with {steps / 'step-5'}" in output
    names = sorted(each for each in os.listdir(steps) if not each.startswith(".datastates-"))
    assert names == ["step-3", "step-4", "step-5"]
    assert f"restored {steps / 'step-2'}" in output + errors

    (tmp_path / "whole").mkdir()
    of_file = text.replace('if __name__ == "__main__":', "if False:")
    whole = run_script(
        WITHOUT_RAY.format(program=of_file), tmp_path / "whole", preface=ranks_of_torchrun(2)
    )
    expected = losses(whole.stdout)
    assert len(expected) == 12, whole.stderr
    assert losses(output + errors) == expected
