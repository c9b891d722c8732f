"""Writes between the call and the reads, to tensors on the fake device: the bytes of the call are committed, or the
save fails. (``tests/unit/staging/test_writes.py`` asks the same on the host.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.devices.fake_cuda import CACHE, FakeCuda, Stepper, differing, model, save
from support.devices.writes import KINDS, Owner, bytes_of, may_escape, outcome, writes_to
from support.state.checkpoints import raises
from support.tiers import sampled

import dcp_datastates
from dcp_datastates import DataStatesReader
from dcp_datastates.errors import SnapshotTornError
from dcp_datastates.io.tensor_memory import inner_tensors


@pytest.fixture(autouse=True)
def process_group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _on_device(cuda: FakeCuda, kind: str) -> tuple[torch.Tensor, Owner, bytes]:
    tensor = KINDS[kind].make()
    expected = bytes_of(tensor)[""]
    for inner in inner_tensors(tensor):
        cuda.adopt(inner)
    return tensor, Owner(tensor), expected


@pytest.mark.parametrize("audit", [False, True])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize(
    "kind", sampled(KINDS, keep=["plain", "plain, by .data", "DTensor", "wrapper"])
)
def test_a_write_before_the_reads_is_never_committed(
    cuda: FakeCuda, kind: str, late: bool, audit: bool, tmp_path: Path
) -> None:
    """``late``: the device does what it is given much later than the host has given it."""
    cuda.await_pinned(CACHE)
    cuda.configure(seed=1, max_delay_us=2000 if late else 0)
    wrong = []
    for number, (name, write) in enumerate(writes_to(kind).items()):
        tensor, owner, expected = _on_device(cuda, kind)
        handle = dcp_datastates.async_save(
            {"w": KINDS[kind].given(tensor)},
            tmp_path / str(number),
            host_cache_size=CACHE,
            reads=600,
            audit=audit,
        )
        with cuda.kernels(), torch.no_grad():
            write(KINDS[kind].target(tensor))
        result = outcome(handle, tensor, expected, tmp_path / str(number))
        cuda.synchronize()
        escapes = not audit and may_escape(kind, name, expected, bytes_of(tensor)[""])
        if result == "WRONG" and not escapes:
            wrong.append(name)
        del owner
    assert not wrong


@pytest.mark.parametrize("seed", sampled(range(4), keep=[0]))
def test_an_optimizer_that_steps_on_a_stream_of_its_own_fails_the_save(
    cuda: FakeCuda, seed: int, tmp_path: Path
) -> None:
    side = cuda.new_stream()

    class Private(Stepper):
        def step(self, closure: Any = None) -> None:
            with cuda.current(side):
                super().step()

    stepper = Private(cuda, model(4))
    cuda.await_pinned(CACHE)
    cuda.synchronize()
    cuda.configure(seed=seed + 1, max_delay_us=20000, piece=16384)
    expected = stepper.now()
    future = save(tmp_path, stepper.named)
    stepper.step()
    error = future.exception()
    cuda.synchronize()
    if error is None:
        assert differing(tmp_path, expected) == []
    else:
        assert "layer" in str(error)


LOADS: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "load": lambda state, path: dcp_datastates.load(path, state),
    "dcp.load": lambda state, path: dcp.load(state, storage_reader=DataStatesReader(path)),
}


@pytest.mark.parametrize(
    ("kind", "load"),
    sampled(
        itertools.product(["plain", "DTensor", "DTensor, by .data"], LOADS),
        keep=[("plain", "load"), ("DTensor, by .data", "dcp.load")],
    ),
)
def test_a_load_waits_for_the_reads_of_what_it_overwrites(
    cuda: FakeCuda, kind: str, load: str, tmp_path: Path
) -> None:
    cuda.await_pinned(CACHE)
    other = KINDS[kind].make()
    dcp_datastates.save({"w": other.detach()}, tmp_path / "other", host_cache_size=CACHE)
    tensor, owner, expected = _on_device(cuda, kind)
    handle = dcp_datastates.async_save(
        {"w": tensor.detach()}, tmp_path / "mine", host_cache_size=CACHE, reads=600
    )
    LOADS[load]({"w": KINDS[kind].target(tensor).detach()}, tmp_path / "other")
    assert outcome(handle, tensor, expected, tmp_path / "mine") == "right"
    cuda.synchronize()
    assert bytes_of(tensor) == bytes_of(other)
    assert owner


def test_a_write_that_torch_does_not_count_is_seen_after_the_optimizer_has_passed(
    cuda: FakeCuda, tmp_path: Path
) -> None:
    """The first gate lets the optimizer go on before the host has seen the reads end; counters say nothing then."""
    stepper = Stepper(cuda, model(2))
    cuda.await_pinned(CACHE)
    cuda.synchronize()
    future = save(tmp_path, stepper.named, reads=600)
    for parameter in stepper.named.values():
        cuda.write(parameter, torch.zeros_like(parameter))
    stepper.step()
    with raises(SnapshotTornError, "layer"):
        future.result()
