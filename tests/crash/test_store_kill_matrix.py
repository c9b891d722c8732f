"""A rank is killed at every named place of a save to an object store: the old checkpoint or the new one is there,
whole, and life goes on.
"""

from __future__ import annotations

import pytest
from support.crashes.cells import OLD, Cell, kill, passes
from support.crashes.matrix import PROPERTY
from support.crashes.store_cells import STORE_CELLS, STORE_NEVER, Prefix
from support.jobs.processes import run_ranks
from support.state.saving import DEFERRED
from support.stores.server import BUCKET, strict_endpoint, variables
from support.tiers import sampled

SAMPLE = (
    *("upload.before-other", "upload.after-coordinator"),
    *("publish.register.after-coordinator", "publish.decide.after-coordinator"),
)


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The URLs of checkpoint 1 by world size, saved once by processes of its own; cells work on copies."""
    scratch = tmp_path_factory.mktemp("committed")
    found = {}
    for world in (2, 3):
        found[world] = f"s3://{BUCKET}/{scratch.parent.name}/{scratch.name}/world{world}/checkpoint"
        for rank in run_ranks(
            "support.state.saving:commit_checkpoint",
            world,
            scratch,
            environments=[variables(strict_endpoint())] * world,
            path=found[world],
            number=OLD,
            elements=DEFERRED,
        ):
            rank.result()
    return found


@pytest.fixture
def root(tmp_path, monkeypatch) -> str:
    """The URL of an empty prefix, whose store this process opens anew."""
    monkeypatch.setattr("dcp_datastates.storage.stores._opened", {})
    for name, value in variables(strict_endpoint()).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{tmp_path.parent.name}/{tmp_path.name}"


@pytest.mark.parametrize("cell", sampled(STORE_CELLS, SAMPLE), ids=str)
def test_a_rank_is_killed(cell: Cell, committed, root, tmp_path, record_property):
    def note(found: str, seconds: float | None = None) -> None:
        about = {"failpoint": cell.point.name, "kind": cell.kind}
        record_property(PROPERTY, {**about, "found": found, "seconds": seconds})

    note("FAILED")
    result = kill(cell, Prefix(committed[cell.world], root), tmp_path)
    note(result.found, result.seconds)


@pytest.mark.parametrize("kind", sampled(sorted(STORE_NEVER), ["other"]))
def test_what_is_declared_never_to_be_passed_is_not(kind, committed, root, tmp_path):
    others = [
        "publish.link.before",
        "flush.write.before",
        "sync.data.before",
        "plan.mkdir.before",
    ]
    names = [*STORE_NEVER[kind], *others]
    assert passes(kind, names, Prefix(committed[2], root), tmp_path) == []
    seen = passes(kind, ["upload.before"], Prefix(committed[2], f"{root}/seen"), tmp_path / "s")
    assert seen == ["upload.before"]
