"""Random programs with ``reuse="unchanged"``: every committed checkpoint is, at any time, what was saved there."""

from __future__ import annotations

import pytest
from support.state.reuse_programs import run_program
from support.tiers import tries


@pytest.mark.parametrize("programs", tries(2, 60, "REUSE_PROGRAMS"))
def test_every_committed_checkpoint_is_what_was_saved(programs, tmp_path):
    outcomes = []
    for seed in range(programs):
        root = tmp_path / str(seed)
        root.mkdir()
        outcomes.append(run_program(root, seed, 30))
    assert sum(each.saves for each in outcomes) >= 5 * programs
    assert sum(each.linked for each in outcomes) >= 2 * programs
    assert sum(each.failed for each in outcomes) > 0
