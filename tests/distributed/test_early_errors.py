"""A call that raises at once, on two ranks in processes of their own: each ends as Python ends, and soon."""

from __future__ import annotations

import itertools

import pytest
from support.jobs.scripts import TWO_RANKS, run_script
from support.tiers import sampled

CALLS = {
    "async_save: a URL": "ds.async_save(state, 's3:///x')",
    "async_save: no path": "ds.async_save(state)",
    "async_save: an option": "ds.async_save(state, path, host_cache_size='1MiB')",
    "async_save: metrics": "ds.async_save(state, path, metrics={'loss': 'low'})",
    "async_save: no state": "ds.async_save([1], path)",
    "async_save: a part raises": "ds.async_save({'part': Raises()}, path)",
    "save: a URL": "ds.save(state, 's3:///x')",
    "save: an option": "ds.save(state, path, commit_timeout=-1)",
    "dcp.save: a URL": "dcp.save(state, storage_writer=ds.DataStatesWriter('s3:///x'))",
    "dcp.async_save: a URL": "dcp.async_save(state, storage_writer=ds.DataStatesWriter('s3:///x'))",
    "load: a URL": "ds.load(state, 's3:///x')",
    "load: nothing is there": "ds.load(state, path)",
    "manager: every": "ds.CheckpointManager(path, every=0)",
    "manager: a URL": "ds.CheckpointManager('s3:///x', every=1)",
    "manager: a step": "ds.CheckpointManager(path, every='10min').save(-1, state)",
    "manager: a second step": "manager = ds.CheckpointManager(path, every='10min')\n"
    "    manager.save(1, state); manager.save(0, state)",
}

PROGRAM = """
class Raises:
    def state_dict(self):
        raise RuntimeError("no state")
    def load_state_dict(self, state):
        pass

state = {{"w": torch.ones(8)}}
if rank in {raising}:
    {call}
"""


@pytest.mark.parametrize(
    ("call", "raising"),
    sampled(
        [
            *itertools.product(CALLS, [(0, 1)]),
            *itertools.product(["async_save: a URL", "save: an option"], [(0,), (1,)]),
            *itertools.product(["manager: a second step", "load: a URL"], [(1,)]),
        ],
        keep=[("manager: a step", (0, 1))],
    ),
)
def test_an_early_error_ends_a_rank_as_python_ends(call, raising, tmp_path):
    # Where only rank 1 raises, rank 0 ends first, and takes the store with it.
    program = PROGRAM.format(call=CALLS[call], raising=raising)
    ended = run_script(program, tmp_path / "c", preface=TWO_RANKS)
    ended.assert_ended_by_errors(len(raising), 2)
