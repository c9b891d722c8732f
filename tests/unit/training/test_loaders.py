"""Data loaders over several epochs: the order after a restore, and the loaders of which it is another."""

import pytest
import torch

from dcp_datastates import CheckpointManager, RngState, inspect

loaders = pytest.importorskip("torchdata.stateful_dataloader")
samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")

DATA = list(range(40))
LENGTH = 10
"""Batches in an epoch."""

STATEFUL, STATELESS = samplers.RandomSampler, torch.utils.data.RandomSampler


def _seeded(seed):
    return torch.Generator().manual_seed(seed)


def _sampled(kind, **options):
    return {"sampler": kind(DATA, generator=_seeded(7)), **options}


LOADERS = {
    "two generators": (lambda: _sampled(STATEFUL, generator=_seeded(8)), True, True),
    "the sampler's generator": (lambda: _sampled(STATEFUL), True, False),
    "no generator": (lambda: {"shuffle": True}, True, False),
    "no order": (dict, True, False),
    "one generator for both": (lambda: {"shuffle": True, "generator": _seeded(7)}, False, None),
    "a sampler without a state": (lambda: _sampled(STATELESS, generator=_seeded(8)), False, None),
}
"""The loader's options; whether it has the same order after a restore; and the program the same draws."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stop", [3, LENGTH + 3, 2 * LENGTH - 1])
@pytest.mark.parametrize("kind", LOADERS)
def test_the_order_over_epochs(kind, stop, tmp_path):
    options, same_order, same_draws = LOADERS[kind]

    def loader():
        return loaders.StatefulDataLoader(DATA, batch_size=4, **options())

    def epochs(state, manager, seen, draws, begin=0):
        step = begin
        for _ in range(4):
            for batch in state["loader"]:
                seen.append(batch.tolist())
                draws.append(torch.rand(1).item())
                if begin == 0 and step == stop:
                    manager.save(step, state, force=True).result()
                step += 1

    torch.manual_seed(0)
    seen, draws, after, again = [], [], [], []
    with CheckpointManager(tmp_path, every=1000) as manager:
        epochs({"loader": loader(), "rng": RngState()}, manager, seen, draws)
    objects = [each.name for each in inspect(tmp_path / f"step-{stop}").objects]
    assert "loader.rank-0" in objects, "each rank has its own"
    torch.manual_seed(123)
    state = {"loader": loader(), "rng": RngState()}
    with CheckpointManager(tmp_path, every=1000) as manager:
        assert manager.restore_latest(state) == stop
        epochs(state, manager, after, again, begin=stop + 1)
    expected = seen[stop + 1 :]
    if same_order:
        assert after[: len(expected)] == expected
    # A new program's first epoch may be the same.
    elif stop >= LENGTH or kind == "one generator for both":
        assert after[: len(expected)] != expected, "the document warns of it in vain"
    if same_draws is not None:
        assert (again[: len(expected)] == draws[stop + 1 :]) is same_draws
