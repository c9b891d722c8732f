"""Crashes of jobs whose checkpoints link each other's files: all that was committed stays whole."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.crashes.crash_states import read_tree
from support.crashes.recovery import Recovery
from support.crashes.traces import Record, read_trace, without
from support.jobs.processes import run_ranks
from support.state.reuse_kills import SAVES, number_of
from support.tiers import tries

from dcp_datastates import verify

WORLD = 2

POINTS = (
    *("reuse.link", "stage", "plan", "vote", "outcome", "cleanup", "cleanup.unlink"),
    *("flush.open", "flush.write", "flush.close", "sync.data", "sync.directory", "read"),
    *("publish.link", "publish.sync_directory", "delete.rename", "delete.unlink"),
)
COORDINATOR_ONLY = ("publish", "delete")


def _run(scratch: Path, seed: int, entry: str = "") -> bool:
    """Whether a rank was killed, at the failpoint ``entry`` or one by chance."""
    chance = random.Random(seed)
    root, log, fired = scratch / "root", scratch / "log", scratch / "fired"
    root.mkdir()
    point = f"{chance.choice(POINTS)}.{chance.choice(['before', 'after'])}"
    victim = 0 if point.startswith(COORDINATOR_ONLY) else chance.randrange(WORLD)
    entry = entry or f"{point}@{chance.randint(1, SAVES)}=kill"
    environments = [
        {"DCP_DATASTATES_FAILPOINTS": entry, "DCP_DATASTATES_FAILPOINTS_LOG": str(fired)}
        if rank == victim
        else {}
        for rank in range(WORLD)
    ]
    ended = run_ranks(
        "support.state.reuse_kills:save_until_killed",
        WORLD,
        scratch,
        environments=environments,
        root=str(root),
        log=str(log),
        seed=seed,
    )
    killed = ended[victim].killed
    assert killed == fired.exists(), f"{entry}: {ended[victim].error}{ended[victim].log}"
    found = {
        path.parent.parent.name: number_of(path.parent.parent, WORLD)
        for path in root.glob("*/*/decision")
    }
    assert all(verify(root / name).whole for name in found)
    _check(found, log, f"seed {seed}, {entry} on rank {victim}")
    if killed:  # and life goes on
        run_ranks(
            "support.state.reuse_kills:save_until_killed",
            WORLD,
            scratch,
            root=str(root),
            log=str(scratch / "later"),
            seed=seed + 1,
        )[0].result()
        for path in root.glob("*/*/decision"):
            number_of(path.parent.parent, WORLD)
            assert verify(path.parent.parent).whole
    else:
        assert ended[0].result() >= 2
    return killed


def _check(found: dict[str, int], log: Path, what: str) -> None:
    """What a rank was told is there, or a later save to the same place, unless it could have been deleted."""
    for rank in range(WORLD):
        newest: dict[str, int] = {}
        begun: dict[str, int] = {}
        kept: list[str] = []
        file = log.with_name(f"{log.name}.{rank}")
        for line in file.read_text().splitlines() if file.exists() else []:
            word, name, number = line.split()
            if word == "begins":
                begun[name] = int(number)
            elif word == "told":
                newest[name] = int(number)
                kept = [*(each for each in kept if each != name), name]
            elif word == "retains":
                kept = kept[-2:]
        for name in kept:
            assert found.get(name) in (newest[name], begun[name]), f"{what}: {name} is {found}"


@pytest.mark.parametrize("point", ["reuse.link.before", "reuse.link.after"])
def test_a_rank_is_killed_while_it_links(point, tmp_path):
    assert _run(tmp_path, 1, f"{point}@2=kill")


@pytest.mark.parametrize("runs", tries(1, 6, "REUSE_KILLS"))
def test_a_rank_is_killed_anywhere(runs, tmp_path):
    killed = 0
    for seed in range(runs):
        scratch = tmp_path / str(seed)
        scratch.mkdir()
        killed += _run(scratch, seed)
    print(f"{killed} of {runs} runs were killed")
    assert killed >= runs // 2


# --- power cuts ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, bytes | None], list[Record]]:
    scratch = tmp_path_factory.mktemp("linked")
    root, trace = scratch / "root", scratch / "trace"
    root.mkdir()
    for rank in run_ranks(
        "support.state.reuse_kills:save_linked_traced",
        WORLD,
        scratch,
        environments=[{"DCP_DATASTATES_TRACE": str(trace)}] * WORLD,
        path=str(root / "checkpoint"),
        start=str(scratch / "start"),
        scale=200,
    ):
        rank.result()
    records = read_trace(trace, root)
    assert sum(record.op == "link" and record.to.endswith(".linked") for record in records) == WORLD
    return read_tree(scratch / "start"), records


@pytest.fixture(scope="module")
def recovery(tmp_path_factory: pytest.TempPathFactory) -> Recovery:
    root = tmp_path_factory.mktemp("recovery") / "disk"
    return Recovery(root, lambda disk: number_of(disk / "checkpoint", WORLD))


def test_a_power_cut_leaves_the_old_checkpoint_or_the_new_one(recording, recovery):
    start, records = recording
    verdicts = recovery.check(start, records, 1, 2)
    print(verdicts)
    assert not verdicts.findings, f"{verdicts}\n{verdicts.findings[0]}"
    assert set(verdicts.loaded) == {"checkpoint 1", "checkpoint 2"}


def test_the_links_must_be_synced_before_the_commit(recording, recovery):
    start, records = recording
    (attempt,) = {Path(record.to).parent for record in records if record.to.endswith(".linked")}
    syncs = [record.id for record in records if record.op == "sync" and record.path == str(attempt)]
    assert syncs
    verdicts = recovery.check(start, without(records, syncs), 1, 2, first=True)
    assert verdicts.findings, verdicts


def test_links_are_synced_before_the_commit_if_there_is_nothing_else(tmp_path):
    root, trace = tmp_path / "root", tmp_path / "trace"
    root.mkdir()
    (rank,) = run_ranks(
        "support.state.reuse_kills:save_unchanged_traced",
        1,
        tmp_path,
        environments=[{"DCP_DATASTATES_TRACE": str(trace)}],
        path=str(root),
    )
    rank.result()
    records = read_trace(trace, root)
    (link,) = [
        place
        for place, record in enumerate(records)
        if record.op == "link" and record.to.endswith(".linked")
    ]
    folder = records[link].to.rpartition("/")[0]
    commit = next(n for n, r in enumerate(records) if r.to == f"{folder}/decision")
    synced = [n for n, r in enumerate(records) if (r.op, r.path) == ("sync_begin", folder)]
    assert any(link < place < commit for place in synced)
