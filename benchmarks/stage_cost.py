"""What capturing 1,000 tensors costs the training thread in the steady state."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_datastates import DataStatesWriter

_TENSORS = 1000
_SKIPPED = 5


@dataclass(frozen=True)
class StageCost:
    """Medians over ``saves``, in milliseconds."""

    tensors: int
    bytes_per_tensor: int
    saves: int
    stage_ms: float
    async_save_ms: float
    """All of ``dcp.async_save``, DCP's own part included."""


def stage_cost(directory: Path, bytes_per_tensor: int, saves: int) -> StageCost:
    """500 parameters and their 500 momenta, owned by an SGD that has stepped; saved again and again."""
    parameters = [
        torch.nn.Parameter(torch.randn(bytes_per_tensor // 4)) for _ in range(_TENSORS // 2)
    ]
    optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # Nested, as jobs have it: DCP spends some 50 µs per key of the outermost dict on logging.
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    for index, parameter in enumerate(parameters):
        state["model"][f"parameter.{index}"] = parameter.detach()
        state["optimizer"][f"momentum.{index}"] = optimizer.state[parameter]["momentum_buffer"]
    assert sum(map(len, state.values())) == _TENSORS

    stage, call = [], []
    for index in range(_SKIPPED + saves):
        path = directory / f"stage-{index}"
        writer = DataStatesWriter(path, host_cache_size="512MiB")
        begun = time.perf_counter()
        future = dcp.async_save(state, storage_writer=writer)
        returned = time.perf_counter()
        optimizer.step()
        future.result()
        assert writer.last_save is not None
        stage.append(writer.last_save.stage_seconds)
        call.append(returned - begun)
        writer.close()
        shutil.rmtree(path)
    return StageCost(
        _TENSORS,
        bytes_per_tensor,
        saves,
        1e3 * median(stage[_SKIPPED:]),
        1e3 * median(call[_SKIPPED:]),
    )
