"""The line of the log that every save ends with: its level, and what it says."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from dcp_datastates.errors import CheckpointSkipped, RankLostError, SaveFailedError, StorageError
from dcp_datastates.process.futures import finish_callbacks
from dcp_datastates.ranks.failure_detector import Loss
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.results import SaveStats, Timeline
from dcp_datastates.saving.outcome import SaveOrigin, conclude, note_failure, record_of
from dcp_datastates.storage.job_notes import note_in

PATH = Path("/ckpt/step-7")


def _line(caplog, error=None, *, world=1, rank=0, origin=SaveOrigin.DCP_ASYNC, **stats):
    stats = SaveStats(**stats)
    stats.timeline = _timeline(0.0, 100.0)
    ranks = RankSet(rank, tuple(range(world)), None)
    record = record_of(origin, ranks, PATH, "a-1", stats, error)
    with caplog.at_level(logging.DEBUG, "dcp_datastates"):
        conclude(record, error)
    (line,) = caplog.records
    assert line.save_record is record
    return line.levelno, line.getMessage()


def _timeline(*times):
    """A timeline whose clock shows these times, and then the last one again and again."""
    left = list(times)
    return Timeline(clock=lambda: left.pop(0) if len(left) > 1 else left[0], wall=lambda: 1e9)


def test_a_commit_tells_ranks_time_size_rate_and_stall(caplog):
    level, text = _line(
        caplog,
        world=4,
        written_bytes=3 << 30,
        total_seconds=2.0,
        call_seconds=0.001,
        gate_seconds=0.0025,
    )
    assert level == logging.INFO
    assert text.startswith("committed '/ckpt/step-7' of 4 ranks in 100.")
    assert "this rank wrote 3072.0 MiB (1.61 GB/s), training waited 3.5 ms" in text


def test_only_one_rank_tells_of_a_commit_unless_asked(caplog):
    level, _ = _line(caplog, world=4, rank=1)
    assert level == logging.DEBUG


def test_a_synchronous_save_of_one_rank_that_wrote_nothing(caplog):
    _, text = _line(caplog, origin=SaveOrigin.DCP)
    assert text.endswith("s; this rank wrote 0.0 MiB (0.00 GB/s)")
    assert "ranks" not in text


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("error", "level", "says"),
    [
        (CheckpointSkipped("all ranks skip this one"), logging.WARNING, "all ranks skip this one"),
        (StorageError(5, "no answer", "f"), logging.ERROR, "no answer"),
        (KeyboardInterrupt(), logging.ERROR, "KeyboardInterrupt"),
    ],
)
def test_a_failure_names_path_cause_and_type_on_every_rank(error, level, says, rank, caplog):
    found, text = _line(caplog, error, world=2, rank=rank)
    assert found == level
    assert text.startswith("the save to '/ckpt/step-7' failed: ")
    assert says in text
    assert text.endswith(f"({type(error).__name__}, 100.0 s after the call)")


def test_a_failure_that_names_the_path_does_not_name_it_twice(caplog):
    _, text = _line(caplog, SaveFailedError("the save to '/ckpt/step-7' failed: rank 1: why"))
    assert text.count("the save to") == 1


def _noted(path, error, rank=0, detector=None):
    """The note of a failure beside ``path``, after this rank of two has seen it."""
    ranks = RankSet(rank, (0, 1), None)
    record = record_of(SaveOrigin.PACKAGE, ranks, path, "a-1", SaveStats(), error)
    note_failure(record, path, detector)
    assert finish_callbacks(60)
    return note_in(path.parent)


def test_the_first_rank_notes_a_failure_beside_the_checkpoints(tmp_path):
    path = tmp_path / "step-7"
    alive = SimpleNamespace(lost_coordinator=None)
    why = SaveFailedError("why")
    for case in ((None,), (CheckpointSkipped("late"),), (why, 1), (why, 1, alive)):
        assert _noted(path, *case) is None
    found = _noted(path, why)
    assert (found.checkpoint, found.attempt) == ("step-7", "a-1")
    assert found.error == "SaveFailedError: why"


def test_another_rank_does_if_the_first_is_lost_and_none_has(tmp_path):
    lost = SimpleNamespace(lost_coordinator=Loss(0, "has ended"))
    found = _noted(tmp_path / "step-7", RankLostError("rank 0 has ended"), 1, lost)
    assert found.error == "RankLostError: rank 0 has ended"
    assert _noted(tmp_path / "step-7", RankLostError("again"), 1, lost) == found
    assert _noted(tmp_path / "step-8", RankLostError("next"), 1, lost).checkpoint == "step-8"
