"""Step 8: a save and a load with the allocator that the environment names, while training allocates and frees.

torch reads PYTORCH_ALLOC_CONF (by its older name, PYTORCH_CUDA_ALLOC_CONF) once: set it before the step starts.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import dcp_datastates
from dcp_datastates import DataStatesReader, DataStatesWriter
from gpu_first.step import Findings, Options, main

_MIB = 1 << 20
_ROUNDS = 4


def measure(options: Options, findings: Findings) -> None:
    findings.note("configuration", os.environ.get("PYTORCH_ALLOC_CONF"))
    if options.device == "cuda":
        findings.note("backend", torch.cuda.get_allocator_backend())
    scale = 16 if options.tiny else 1
    # Larger than the pieces of physical memory that expandable segments are mapped from, and odd.
    sizes = [256 * _MIB // scale, 20 * _MIB // scale + 4, 3 * _MIB // scale, 1028, 4]
    parameters = {
        f"{index}": torch.nn.Parameter(torch.randn(nbytes // 4, device=options.device))
        for index, nbytes in enumerate(sizes)
    }
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3)
    dcp_datastates.track(optimizer)
    step(parameters, optimizer, options)
    writer = DataStatesWriter(host_cache_size="64MiB" if options.tiny else "2GiB")
    for index in range(_ROUNDS):
        state = state_of(parameters, optimizer)
        expected = {name: value.detach().clone() for name, value in state.items()}
        handle = dcp_datastates.async_save(state, options.dir / f"{index}", writer=writer)
        step(parameters, optimizer, options)
        handle.result()
        del state
        found = {name: torch.empty_like(value) for name, value in expected.items()}
        dcp.load(found, storage_reader=DataStatesReader(options.dir / f"{index}"))
        differing = [n for n, value in expected.items() if not torch.equal(found[n], value)]
        assert not differing, f"loaded otherwise than saved: {differing}"
        del found, expected
        findings.note("rounds_equal", index + 1)
    writer.close()


def step(parameters: dict[str, Any], optimizer: torch.optim.Optimizer, options: Options) -> None:
    """Gradients, scratch that is freed at once and given back to the driver, and the optimizer's step."""
    for parameter in parameters.values():
        scratch = torch.full_like(parameter, 0.5)
        parameter.grad = scratch * 2
    del scratch
    if options.device == "cuda":
        torch.cuda.empty_cache()
    optimizer.step()
    optimizer.zero_grad()


def state_of(
    parameters: dict[str, Any], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    slots = {
        f"{name}.{slot}": value
        for name, parameter in parameters.items()
        for slot, value in optimizer.state[parameter].items()
    }
    return {**parameters, **slots}


if __name__ == "__main__":
    sys.exit(main(measure))
