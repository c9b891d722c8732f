"""The stock Trainer over DeepSpeed deletes older checkpoints when a save returns: one that is committed is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")


def job(
    folder: Path, *, resume: bool = False, kill_at: int = -1, failpoints: str = ""
) -> tuple[int, dict[str, Any], str]:
    """The exit code, the losses by step, and what it has printed."""
    environment = {
        **os.environ,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(20000 + os.getpid() % 20000),
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DCP_DATASTATES_FAILPOINTS": failpoints,
    }
    script = Path(__file__).with_name("trainer_job.py")
    arguments = [str(folder), "yes" if resume else "no", str(kill_at)]
    ended = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    losses = [line for line in ended.stdout.splitlines() if line.startswith("LOSSES ")]
    found = json.loads(losses[0].removeprefix("LOSSES ")) if losses else {}
    return ended.returncode, found, ended.stdout + ended.stderr


def committed(folder: Path) -> list[str]:
    return sorted(path.parent.parent.name for path in folder.glob("*/*/.metadata"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    code, losses, log = job(tmp_path_factory.mktemp("whole") / "run")
    assert code == 0, log
    assert list(losses) == list("123456")
    return losses


@pytest.mark.parametrize(
    ("kill", "newest"),
    [({"kill_at": 4}, 4), ({"failpoints": "publish.link.before@2=kill"}, 2)],
    ids=["right behind a save", "within a save"],
)
def test_after_a_kill_the_newest_committed_save_is_there(
    tmp_path: Path, whole: dict[str, Any], kill: dict[str, Any], newest: int
) -> None:
    code, _, log = job(tmp_path, **kill)
    assert code == -9, log
    assert committed(tmp_path) == [f"checkpoint-{newest}"]
    assert newest == 4 or (tmp_path / "checkpoint-4").is_dir()
    code, losses, log = job(tmp_path, resume=True)
    assert code == 0, log
    assert {step: loss for step, loss in losses.items() if int(step) > newest} == {
        step: loss for step, loss in whole.items() if int(step) > newest
    }


def test_a_save_that_fails_ends_the_training_before_anything_is_deleted(tmp_path: Path) -> None:
    code, _, log = job(tmp_path, failpoints="flush.open.before@2=error:ENOSPC")
    assert code == 1
    assert "No space left" in log
    assert committed(tmp_path) == ["checkpoint-2"]
