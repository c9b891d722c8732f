"""Every save ends in one line of the log, and asking for its outcome starts its reads."""

import contextlib
from concurrent.futures import Future, wait

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.crashes.failing import armed
from support.jobs.scripts import run_script
from support.state.checkpoints import CACHE, save, writer
from support.state.loops import owned
from support.waiting import lines

import dcp_datastates
from dcp_datastates.commit.group import commit_group
from dcp_datastates.config import WriterConfig
from dcp_datastates.errors import StorageError
from dcp_datastates.io.engine import engine
from dcp_datastates.ranks.rank_set import ALONE
from dcp_datastates.results import SaveStats
from dcp_datastates.saving.operation import Phase, SaveOperation
from dcp_datastates.saving.outcome import SaveOrigin


def _own(state, path):
    return dcp_datastates.async_save(state, path, host_cache_size=CACHE).committed


def _by_dcp(state, path):
    ours = writer(path)
    dcp.async_save(state, storage_writer=ours)
    return ours.committed


def _synchronous_by_dcp(state, path):
    with contextlib.suppress(dcp.api.CheckpointException):
        save(state, path)
    return Future()


@pytest.mark.parametrize("call", [_own, _by_dcp, _synchronous_by_dcp])
def test_an_outcome_is_one_line_whoever_asks(call, tmp_path):
    engine()  # which has a line of its own
    asynchronous = call is not _synchronous_by_dcp
    with lines() as said, armed("publish.write.before=error:ENOSPC"):
        wait([call({"w": torch.ones(10)}, tmp_path / "c")], 30 * asynchronous)
    (line,) = said
    assert line.startswith(f"the save to {str(tmp_path / 'c')!r} failed")
    assert "No space left on device" in line
    with lines() as said:
        wait([call({"w": torch.ones(10)}, tmp_path / "c")], 30 * asynchronous)
    (line,) = said
    assert line.startswith(f"committed {str(tmp_path / 'c')!r}")
    assert ("training waited" in line) == asynchronous


def test_a_failure_reaches_stderr_in_a_program_without_logging(tmp_path):
    ended = run_script(
        """
        import dcp_datastates
        os.environ["DCP_DATASTATES_FAILPOINTS"] = "flush.write.before=error:ENOSPC"
        dcp_datastates.async_save({"w": torch.ones(10)}, path, host_cache_size="64MiB")
        """,
        tmp_path / "c",
    )
    assert ended.returncode == 0
    assert "No space left on device" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr


@pytest.mark.parametrize(
    "name", ["result", "wait", "captured", "committed", "upload_completion", "staging_completion"]
)
def test_asking_for_an_outcome_starts_the_reads(name, tmp_path):
    state, optimizer = owned()
    handle = dcp_datastates.async_save(state, tmp_path / "c", reads=3600, host_cache_size=CACHE)
    asked = getattr(handle, name)
    asked(30) if callable(asked) else asked.result(30)
    assert handle.captured.done()
    handle.result(30)
    assert handle.path == tmp_path / "c"
    assert handle.stats.deferred_bytes == 4_000_000
    del optimizer


def test_what_is_not_known_yet_is_none(tmp_path):
    state, _optimizer = owned()
    handle = dcp_datastates.async_save(state, tmp_path / "c", reads=3600, host_cache_size=CACHE)
    told = handle.stats
    later = ("written_bytes", "read_seconds", "total_seconds", "direct", "steady")
    assert [getattr(told, name) for name in later] == [None] * len(later)
    handle.result()
    assert None not in [getattr(told, name) for name in later]


def test_save_copies_nothing_that_can_be_read_in_place(tmp_path):
    free = {"w": torch.ones(1_000_000)}  # no optimizer owns it
    stats = dcp_datastates.save(free, tmp_path / "c", host_cache_size=CACHE)
    assert stats.eager_bytes == 0


def _synchronous(path):
    config, stats = WriterConfig(64 << 20), SaveStats()
    return SaveOperation(commit_group(ALONE), config, SaveOrigin.DCP, path, stats, {})


def test_a_save_that_was_ended_while_it_claimed_holds_up_no_later_one(tmp_path):
    """As when a signal handler saves, too."""
    ended = _synchronous(tmp_path / "a")
    ended.begin()
    ended.end()
    ended.draw_ticket()
    assert ended.phase < Phase.AGREED
    save({"w": torch.ones(10)}, tmp_path / "b")


@pytest.mark.parametrize("how", ["fail", "give_up"])
def test_a_save_that_fails_after_the_agreement_holds_up_no_later_one(how, tmp_path):
    failed = _synchronous(tmp_path / "a")
    failed.begin()
    failed.draw_ticket()
    failed.give_up("enough") if how == "give_up" else failed.fail(StorageError(5, "enough"))
    save({"w": torch.ones(10)}, tmp_path / "b")
