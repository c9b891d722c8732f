"""When a tag counts: ``latest`` names it only when it is committed on all ranks, whatever fails or is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_datastates.deepspeed import CheckpointEngine
from dcp_datastates.storage import decisions
from deepspeed_jobs import SECONDS, run, started


@pytest.fixture(scope="module")
def ordered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A job that has looked at ``latest`` all along: see ``orders`` in the worker."""
    root = tmp_path_factory.mktemp("ordered")
    return root, run("orders", root)


def test_training_goes_on_while_latest_waits_for_the_commit(
    ordered: tuple[Path, list[Any]],
) -> None:
    """Two saves and three steps came before the first commit; then ``latest`` named the newer one."""
    for rank in ordered[1]:
        assert rank["named"][:4] == [None, None, None, "global_step2"]


def test_latest_stays_if_the_job_does_not_want_it(ordered: tuple[Path, list[Any]]) -> None:
    root, ranks = ordered
    assert {rank["named"][4] for rank in ranks} == {"global_step2"}
    assert (root / "unnamed" / "mp_rank_00_model_states.pt").exists()


def test_failed_saves_are_counted_on_all_ranks_and_training_goes_on(
    ordered: tuple[Path, list[Any]],
) -> None:
    root, ranks = ordered
    for rank in ranks:
        assert rank["failed"] == [1, 2, 3]
        assert "in-the-way" in rank["refused"]
        assert rank["named"][5] == "global_step2"
    log = (root / "orders-0.log").read_text()
    assert "the save of tag 'in-the-way'" in log
    assert "the save of tag 'not-picklable'" in log
    assert "the save of tag 'full'" in log
    assert "No space left" in log
    assert not (root / "not-picklable" / ".metadata").exists()


def test_a_load_waits_for_the_saves_before_it(ordered: tuple[Path, list[Any]]) -> None:
    for rank in ordered[1]:
        assert rank["named"][6] == "good"
        assert rank["state"] is True
        assert rank["same"], "the step behind the load has the loss of the step behind the save"


def test_a_single_file_of_weights_is_torchs(ordered: tuple[Path, list[Any]]) -> None:
    for rank in ordered[1]:
        assert "first.weight" in rank["model"]


def test_a_tag_that_was_not_committed_is_not_loaded(ordered: tuple[Path, list[Any]]) -> None:
    assert all(rank["not committed"] for rank in ordered[1])


def test_the_end_of_the_process_finishes_the_last_save(ordered: tuple[Path, list[Any]]) -> None:
    root, _ = ordered
    assert (root / "latest").read_text() == "last"
    assert "Traceback" not in (root / "orders-1.log").read_text()


def test_after_a_kill_the_previous_tag_loads(tmp_path: Path) -> None:
    """Rank 0 is killed before the commit of the second save, or between its commit and ``latest``."""
    for name, place in (("uncommitted", "publish.link"), ("unnamed", "latest.rename")):
        root = tmp_path / name
        root.mkdir()
        environment = {"DCP_DATASTATES_FAILPOINTS": f"{place}.before@2=kill"}
        with started("killed", root, environment=environment) as (first, _):
            assert first.wait(SECONDS) == -signal.SIGKILL
        assert (root / "tag-1" / ".metadata").exists() == (name == "unnamed")
    for rank in run("goes_on", tmp_path):
        for name in ("uncommitted", "unnamed"):
            assert rank[name] == {"named": "tag-0", "step": 0}
            assert (tmp_path / name / "latest").read_text() == "tag-1"


# ---- without DeepSpeed's engine, in this process ---------------------------------------------------


@pytest.fixture
def alone() -> CheckpointEngine:
    """A checkpoint engine of a job of one rank."""
    given = types.SimpleNamespace(config={"host_cache_size": 0.125})
    return CheckpointEngine(types.SimpleNamespace(datastates_config=given), 0)


def save(engine: CheckpointEngine, root: Path, tag: str, value: Any = 1) -> None:
    """What ``save_checkpoint`` does."""
    with engine.collecting():
        engine.save({"value": value}, root / tag / "mp_rank_00_model_states.pt")
    engine.commit(root, tag, True, "backward")


def test_latest_that_cannot_be_written_is_a_failed_save(
    alone: CheckpointEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = alone.failed_saves
    (tmp_path / "latest").mkdir()
    save(alone, tmp_path, "tag")
    alone.wait(persist=True)
    assert alone.failed_saves == before + 1
    assert "the save of tag 'tag'" in caplog.text
    (tmp_path / "latest").rmdir()
    save(alone, tmp_path, "next")
    alone.wait(persist=True)
    assert (tmp_path / "latest").read_text() == "next"


def test_a_tag_can_be_saved_again(alone: CheckpointEngine, tmp_path: Path) -> None:
    for value in range(3):
        save(alone, tmp_path, "tag", value)
    alone.wait(persist=True)
    assert alone.load(tmp_path / "tag" / "mp_rank_00_model_states.pt") == {"value": 2}


def test_a_file_of_torchs_in_the_place_of_a_placeholder_is_loaded(
    alone: CheckpointEngine, tmp_path: Path
) -> None:
    """DeepSpeed's own engine has saved the tag again."""
    save(alone, tmp_path, "tag")
    alone.wait(persist=True)
    path = tmp_path / "tag" / "mp_rank_00_model_states.pt"
    torch.save({"value": "newer"}, path)
    assert alone.load(path) == {"value": "newer"}


def test_an_error_within_save_checkpoint_drops_its_files(
    alone: CheckpointEngine, tmp_path: Path
) -> None:
    path = tmp_path / "tag" / "mp_rank_00_model_states.pt"

    def fails() -> None:
        with alone.collecting():
            alone.save({}, path)
            raise RuntimeError("of DeepSpeed's")

    with pytest.raises(RuntimeError, match="of DeepSpeed's"):
        fails()
    with alone.collecting():
        pass
    alone.commit(tmp_path, "tag", True, "backward")
    alone.wait(persist=True)
    assert not path.exists()


def test_the_end_of_the_process_waits_for_latest(tmp_path: Path) -> None:
    """It is written only when the end of the process waits for it."""
    code = """
import sys, threading, types
from pathlib import Path
from dcp_datastates.checkpoints.retention import Deletions
from dcp_datastates.deepspeed import CheckpointEngine
from dcp_datastates.deepspeed import engine as module
waiting = threading.Event()
write, wait = module.replace_durably, Deletions.wait
module.replace_durably = lambda *given: (waiting.wait(), write(*given))
Deletions.wait = lambda *given: (waiting.set(), wait(*given))[1]
given = types.SimpleNamespace(config={"host_cache_size": 0.125})
engine = CheckpointEngine(types.SimpleNamespace(datastates_config=given), 0)
root = Path(sys.argv[1])
with engine.collecting():
    engine.save({}, root / "tag" / "mp_rank_00_model_states.pt")
engine.commit(root, "tag", True, "backward")
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "latest").read_text() == "tag"


def test_a_collection_in_another_thread_does_not_wait(
    alone: CheckpointEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the commit thread waited for its own save, it would wait forever."""
    waited = threading.Event()
    decide = decisions.decide

    def wait_and_decide(*args: Any) -> Any:
        alone.wait(persist=True)
        waited.set()
        return decide(*args)

    monkeypatch.setattr(decisions, "decide", wait_and_decide)
    save(alone, tmp_path, "tag")
    assert waited.wait(60)
    alone.wait(persist=True)
    assert (tmp_path / "latest").read_text() == "tag"
