"""Parameters that nothing trains: copied in each call, unless the program says that they need not be."""

import pytest
import torch
from support.state.loops import manager
from torch.distributed.fsdp import fully_shard

import dcp_datastates as ds

FROZEN, WIDTH = 3, 160  # layers of 100 KiB, which is deferred


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("told", [False, True])
def test_frozen_parameters_are_not_copied_if_the_program_says_so(told, sharded, tmp_path):
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(FROZEN + 1)]
    model = torch.nn.Sequential(*layers)
    model[:FROZEN].requires_grad_(False)
    if sharded:
        fully_shard(model)
    optimizer = torch.optim.SGD(layers[-1].parameters(), 0.1, momentum=0.9)
    frozen = [each for each in model.parameters() if not each.requires_grad]
    ds.track(optimizer, also=frozen if told else ())
    with manager(tmp_path, reads=600.0) as checkpoints:
        for number in range(3):
            handle = checkpoints.save(number, {"model": model, "optimizer": optimizer})
            copied = handle.stats.eager_bytes
            assert copied < 1000 if told else copied >= FROZEN * 4 * WIDTH * WIDTH
            model(torch.ones(2, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            handle.result()
