"""Whatever a power cut leaves of a deletion, of all that POSIX allows, is the whole checkpoint, or none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.crashes.crash_states import Tree, read_tree
from support.crashes.recovery import Recovery
from support.crashes.traces import Record, read_trace, without
from support.state.checkpoints import committed, load_everything, save

from dcp_datastates import delete

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
def recovery(tmp_path) -> Recovery:
    def number_at(root: Path) -> int | None:
        if not committed(root / "step"):
            return None
        found = load_everything(root / "step")
        assert found["w"].eq(torch.arange(1000.0)).all()
        return int(found["number"])

    return Recovery(tmp_path / "disk", number_at)


def test_every_crash_leaves_the_checkpoint_or_none(deleted, recovery):
    start, records = deleted
    verdicts = recovery.check(start, records, NUMBER, None)
    print(verdicts)
    assert not verdicts.findings, verdicts.findings[0]
    assert set(verdicts.loaded) == {"none", f"checkpoint {NUMBER}"}


def test_the_sync_after_the_rename_cannot_be_left_out(deleted, recovery):
    start, records = deleted
    syncs = [
        record.id for record in records if record.op == "sync" and record.path.startswith("step/")
    ]
    assert syncs
    verdicts = recovery.check(start, without(records, syncs), NUMBER, None, first=True)
    assert verdicts.findings
