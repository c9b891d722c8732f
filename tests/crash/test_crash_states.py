"""Whatever a crash leaves, of all that POSIX allows, is the old checkpoint or the new one, whole.

Two ranks save, and every file operation is recorded. The crash states of the recording are all put on disk
and loaded. Then the recording is spoilt, as if one sync had been forgotten or one rename been a copy: now
some state must be broken, or the check (or the sync) would be worth nothing. The same of a deletion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from support.crashes.crash_states import CrashState, Disk, Tree, crash_states, read_tree
from support.crashes.traces import Record, in_blocks, in_place, read_trace, without
from support.jobs.processes import run_ranks
from support.state.checkpoints import causes, committed, load_everything, save
from support.state.saving import number_at
from support.tiers import sampled
from torch.distributed.checkpoint.api import CheckpointException

from dcp_datastates import delete

Verdict = int | None | str
"""The number of the checkpoint that loads, None if there is none, or why what is there does not load."""


@dataclass(frozen=True)
class Finding:
    """A state that must not be: how it came about, and what is wrong with it."""

    state: CrashState
    after: Record | None
    why: str

    def __str__(self) -> str:
        files = "\n".join(
            f"    {path} {'/' if content is None else f'{len(content)} bytes'}"
            for path, content in sorted(self.state.tree.items())
        )
        return f"crash point {self.state.point}, after {self.after}: {self.why}; on disk:\n{files}"


@dataclass
class Verdicts:
    """What enumerating a trace came to."""

    points: int = 0
    states: int = 0
    distinct: set[bytes] = field(default_factory=set)
    loaded: Counter[str] = field(default_factory=Counter)
    """Distinct states by what they load as."""
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.points} crash points, {self.states} states, {len(self.distinct)} distinct: "
            + ", ".join(f"{count} load as {what}" for what, count in sorted(self.loaded.items()))
        )


class Recovery:
    """Loads every state that a crash may leave, each one once, however many traces it comes from."""

    def __init__(self, root: Path, number_at: Callable[[Path], int | None]) -> None:
        """``number_at`` says which checkpoint is in the tree below a directory; it may raise."""
        self._disk = Disk(root)
        self._number_at = number_at
        self._known: dict[bytes, Verdict] = {}

    def check(
        self,
        start: Tree,
        records: Sequence[Record],
        before: int | None,
        after: int | None,
        *,
        first: bool = False,
    ) -> Verdicts:
        """Every state must load as checkpoint ``before`` or ``after`` (None: none): as ``after`` once a rank was told.

        ``first``: stop at the first finding.
        """
        verdicts = Verdicts()
        points = set()
        for state in crash_states(start, records):
            points.add(state.point)
            verdicts.states += 1
            key = state.key
            verdict = self._verdict(key, state.tree)
            if key not in verdicts.distinct:
                verdicts.distinct.add(key)
                verdicts.loaded[_name(verdict)] += 1
            why = _why(verdict, before, after, bool(state.told))
            if why:
                record = records[state.point - 1] if state.point else None
                verdicts.findings.append(Finding(state, record, why))
                if first:
                    break
        verdicts.points = len(points)
        return verdicts

    def _verdict(self, key: bytes, tree: Tree) -> Verdict:
        if key not in self._known:
            self._disk.become(tree)
            try:
                self._known[key] = self._number_at(self._disk.root)
            except (Exception, CheckpointException) as error:  # DCP's is a BaseException
                self._known[key] = "; ".join(f"{type(c).__name__}: {c}" for c in causes(error))
        return self._known[key]


def _name(verdict: Verdict) -> str:
    if isinstance(verdict, str):
        return "broken"
    return "none" if verdict is None else f"checkpoint {verdict}"


def _why(verdict: Verdict, before: int | None, after: int | None, told: bool) -> str:
    if isinstance(verdict, str):
        return verdict
    if told and verdict != after:
        return f"a rank was told that checkpoint {after} is committed; {_name(verdict)} is there"
    if verdict not in (before, after):
        return f"{_name(verdict)} is there, neither {before} nor {after}"
    return ""


# --- a save ---------------------------------------------------------------------------------------

WORLD = 2
ELEMENTS = 3000
OLD, NEW = 1, 2
WIDE = {"DCP_DATASTATES_FAILPOINTS": "sync.data.before=sleep:0.2;sync.directory.before@1=sleep:0.2"}
"""Nothing of either rank is synced until both have written all: a crash has the most to choose from."""
CHECKPOINT = "runs/7/checkpoint"  # below directories that the first save has to make


@dataclass(frozen=True)
class Recording:
    """One save as it was recorded."""

    start: Tree
    records: tuple[Record, ...]
    before: int | None
    after: int


def _save(root: Path, number: int, scratch: Path) -> list[Record]:
    trace = scratch / f"trace{number}"
    ended = run_ranks(
        "support.state.saving:save_traced",
        WORLD,
        scratch,
        environments=[{"DCP_DATASTATES_TRACE": str(trace), **WIDE}] * WORLD,
        path=str(root / CHECKPOINT),
        number=number,
        elements=ELEMENTS,
    )
    for rank in ended:
        rank.result()
    return in_blocks(read_trace(trace, root))


def _record(scratch: Path) -> dict[str, Recording]:
    """A first save, and a save over it."""
    root = scratch / "root"
    root.mkdir()
    recordings = {}
    for name, before, after in (("first", None, OLD), ("over", OLD, NEW)):
        start = read_tree(root)
        records = _save(root, after, scratch)
        _assert_complete(records)
        recordings[name] = Recording(start, tuple(records), before, after)
    return recordings


def _data_files(records: Sequence[Record], op: str) -> set[str]:
    return {r.path for r in records if r.op == op and r.path.endswith(".safetensors")}


def _assert_complete(records: Sequence[Record]) -> None:
    for op in ("create", "write", "sync"):
        assert len(_data_files(records, op)) >= WORLD, (
            f"the trace has no {op!r} record of each rank's data file: "
            f"the native engine did not trace, so nothing can be said about a crash"
        )
    assert any(record.op == "told" for record in records)
    assert any(map(_is_commit, records))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("crash")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory):
    return _record(tmp_path_factory.mktemp("recordings"))


@pytest.fixture(scope="module")
def recovery(tmp_path_factory: pytest.TempPathFactory) -> Recovery:
    return Recovery(
        tmp_path_factory.mktemp("recovery") / "disk",
        lambda root: number_at(root / CHECKPOINT, WORLD, ELEMENTS),
    )


@pytest.mark.parametrize("which", ["first", "over"])
def test_every_crash_leaves_the_old_checkpoint_or_the_new_one(which, recordings, recovery):
    recording = recordings[which]
    verdicts = recovery.check(recording.start, recording.records, recording.before, recording.after)
    print(f"{which} save: {verdicts}")
    assert not verdicts.findings, f"{verdicts}\n{verdicts.findings[0]}"
    assert verdicts.states >= 5000
    assert len(verdicts.distinct) >= (300 if which == "first" else 1000)
    assert set(verdicts.loaded) == {
        "none" if recording.before is None else f"checkpoint {recording.before}",
        f"checkpoint {recording.after}",
    }


# --- the same, spoilt -----------------------------------------------------------------------------

HARMLESS = {
    ("over", "without the syncs of . before the commit"): "its entry was durable before",
    ("over", "without the syncs of runs before the commit"): "its entry was durable before",
    ("over", "without the syncs of runs/7 before the commit"): "its entry was durable before",
}
"""What may be left out, and why: a parent that was there before is synced only because another rank may
have made it a moment ago, and had not synced it yet. All else must be missed."""


def _is_commit(record: Record) -> bool:
    return record.op == "link" and record.to.endswith("/decision")


def _spoilt(recording: Recording) -> Iterator[tuple[str, list[Record]]]:
    """The recording without each sync in turn, and with the commit's link replaced by a copy. What comes after a rank
    was told of the commit is cleanup, and does not count.

    A directory is synced by every rank, and the last one's sync covers the others' entries: those on one
    side of the commit are left out together.
    """
    records = recording.records
    directories = {"", *(path for path, content in recording.start.items() if content is None)}
    directories |= {record.path for record in records if record.op == "mkdir"}
    commit = next(place for place, record in enumerate(records) if _is_commit(record))
    groups: dict[str, list[str]] = {}
    told = next(place for place, record in enumerate(records) if record.op == "told")
    for place, record in enumerate(records[:told]):
        if _is_commit(record):
            target = recording.start.get(record.to)
            yield f"{record} as a copy", in_place(records, record, target)
        elif record.op == "sync":
            where = record.path or "."
            side = "before" if place < commit else "after"
            name = (
                f"without the syncs of {where} {side} the commit"
                if record.path in directories
                else f"without the sync of {where}"
            )
            groups.setdefault(name, []).append(record.id)
    for name, syncs in groups.items():
        yield name, without(records, syncs)


@pytest.mark.parametrize("which", sampled(["first", "over"], keep=["first"]))
def test_no_sync_and_no_link_can_be_left_out(which, recordings, recovery):
    recording = recordings[which]
    harmless = set()
    for name, records in _spoilt(recording):
        verdicts = recovery.check(
            recording.start, records, recording.before, recording.after, first=True
        )
        if (which, name) in HARMLESS:
            harmless.add(name)
            assert not verdicts.findings, f"{name} is not harmless: {verdicts.findings[0]}"
            print(f"{which} save, {name}: harmless, {HARMLESS[which, name]}")
        else:
            assert verdicts.findings, f"{name}: nothing is lost in any state; {verdicts}"
            print(f"{which} save, {name}: {verdicts.findings[0].why[:110]}")
    assert harmless == {name for where, name in HARMLESS if where == which}


# --- a deletion -----------------------------------------------------------------------------------

NUMBER = 7


@pytest.fixture
def deleted(tmp_path, monkeypatch) -> tuple[Tree, list[Record]]:
    """What was there before a deletion, and what it did."""
    root, trace = tmp_path / "root", tmp_path / "trace"
    save({"w": torch.arange(1000.0), "number": NUMBER}, root / "step")
    start = read_tree(root)
    monkeypatch.setenv("DCP_DATASTATES_TRACE", str(trace))
    delete(root / "step")
    monkeypatch.delenv("DCP_DATASTATES_TRACE")
    return start, read_trace(trace, root)


@pytest.fixture
def recovery_of_a_deletion(tmp_path) -> Recovery:
    def number_at(root: Path) -> int | None:
        if not committed(root / "step"):
            return None
        found = load_everything(root / "step")
        assert found["w"].eq(torch.arange(1000.0)).all()
        return int(found["number"])

    return Recovery(tmp_path / "disk", number_at)


def test_every_crash_in_a_deletion_leaves_the_checkpoint_or_none(deleted, recovery_of_a_deletion):
    start, records = deleted
    verdicts = recovery_of_a_deletion.check(start, records, NUMBER, None)
    print(verdicts)
    assert not verdicts.findings, verdicts.findings[0]
    assert set(verdicts.loaded) == {"none", f"checkpoint {NUMBER}"}


def test_the_sync_of_a_deletion_cannot_be_left_out(deleted, recovery_of_a_deletion):
    start, records = deleted
    syncs = [
        record.id for record in records if record.op == "sync" and record.path.startswith("step/")
    ]
    assert syncs
    verdicts = recovery_of_a_deletion.check(
        start, without(records, syncs), NUMBER, None, first=True
    )
    assert verdicts.findings
