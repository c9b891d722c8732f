"""States that several ranks need the same bytes of, and jobs that load them. Bodies of jobs on ranks."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from dcp_datastates.dcp import reader
from dcp_datastates.sharing import peers, shared_reads
from support.jobs.links import Link
from support.state.checkpoints import assert_same, load, save, zeros
from support.state.states import filled

__all__ = [
    "LAYOUTS",
    "bytes_read",
    "kill_one_that_passes_on",
    "laid_out",
    "linked",
    "state",
    "total",
]

LAYOUTS = {
    "ddp": ((4,), [Replicate()], 4),
    "hsdp": ((2, 2), [Replicate(), Shard(0)], 2),
    "tp": ((4,), [Shard(1)], 1),
    "fsdp": ((4,), [Shard(0)], 1),
}
"""Mesh and placements on four ranks, and on how many of them each byte is."""


def laid_out(
    full: dict[str, torch.Tensor], shape: tuple[int, ...], placements: list[Placement]
) -> dict[str, Any]:
    if placements == [Replicate()]:
        return {name: tensor.clone() for name, tensor in full.items()}
    mesh = init_device_mesh("cpu", shape)
    return {
        name: distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None)
        for name, tensor in full.items()
    }


def state(layout: str, tensors: int = 5, rows: int = 2051) -> dict[str, Any]:
    """About 8 MiB in each tensor."""
    shape, placements, _ = LAYOUTS[layout]
    full = {f"w{n}": filled((rows, 1024), torch.float32, n) for n in range(tensors)}
    return laid_out(full, shape, placements)


def total(value: int) -> int:
    """The sum over all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return sum(values)


def bytes_read(run: Callable[[], object]) -> int:
    """The bytes that all ranks together have read from files while they ran ``run``."""
    dist.barrier()
    before = _read_so_far()
    run()
    return total(_read_so_far() - before)


def _read_so_far() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@contextlib.contextmanager
def linked(harm: Callable[[bytes], bytes | None]) -> Iterator[list[Link]]:
    """Other ranks reach this one, while it loads, through links that do ``harm``."""
    links = []
    offer = reader.offer

    def offer_of_link(*arguments: Any) -> Any:
        own = offer(*arguments)
        address = own.offer.address
        links.append(Link(address.host, address.port, harm))
        address = address._replace(port=links[0].port)
        return replace(own, offer=replace(own.offer, address=address))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "offer", offer_of_link)
        patch.setattr(peers, "_ANSWER_SECONDS", 1.0)
        yield links
    for link in links:
        link.close()


def kill_one_that_passes_on(root: str, killed: int) -> bool:
    """Rank ``killed`` is killed when another asks it for the third time. Returns whether this rank has read all."""
    expected = state("ddp")
    save(expected, f"{root}/c")
    target = zeros(expected)
    asked = 0
    keep = shared_reads.KeptUnits.take

    def take(self: Any, unit: Any, nbytes: int) -> None:
        nonlocal asked
        asked += unit.owner == killed == dist.get_rank()
        if asked > 2:
            os.kill(os.getpid(), signal.SIGKILL)
        keep(self, unit, nbytes)

    has_read = False
    read_data = reader.DataStatesReader.read_data

    def read(self: Any, *arguments: Any) -> Any:
        nonlocal has_read
        future = read_data(self, *arguments)
        assert_same(target, expected)
        has_read = True
        return future

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_reads.KeptUnits, "take", take)
        patch.setattr(reader.DataStatesReader, "read_data", read)
        with contextlib.suppress(Exception):  # the ranks' last gather fails
            load(target, f"{root}/c", share_reads=True)
    return has_read
