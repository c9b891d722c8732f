"""The device path on a real GPU: ``make gpu-test``. Without one, the fake driver's tests carry it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.waiting import await_that
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.checkpoint import checkpoint

import dcp_datastates
from dcp_datastates import DataStatesReader, DataStatesWriter
from dcp_datastates._native import Engine
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.io import engine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

CACHE = 512 << 20
WIDTH = 1024


@pytest.fixture
def writer() -> Iterator[DataStatesWriter]:
    made = DataStatesWriter(host_cache_size=CACHE)
    yield made
    made.close()


class Net(torch.nn.Module):
    """Large matrices, small vectors, and a BatchNorm, whose buffers no optimizer owns."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            x = torch.relu(x)
        result: torch.Tensor = self.norm(x)
        return result


def flat(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            found[f"{prefix}{name}"] = value
        elif isinstance(value, dict):
            found.update(flat(value, f"{prefix}{name}."))
    return found


def state_of(net: torch.nn.Module, optimizers: Any) -> dict[str, Any]:
    model, optimizer = get_state_dict(net, optimizers)
    return {"model": model, "optimizer": optimizer}


def copied(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """In stream order, and so without slowing down what is tested."""
    return {name: value.detach().clone() for name, value in flat(state).items()}


def differing(path: Path, expected: dict[str, torch.Tensor]) -> list[str]:
    found = {name: torch.empty_like(value, device="cpu") for name, value in expected.items()}
    dcp.load(found, storage_reader=DataStatesReader(path))
    return [name for name, value in expected.items() if not torch.equal(found[name], value.cpu())]


def prepared_engine() -> Engine:
    """When the host cache is pinned, or it is known why not."""
    native = engine.engine(CACHE)
    native.open_device(torch.cuda.current_device())
    await_that(lambda: native.devices_prepared, otherwise="the engine does not get ready")
    return native


def batch() -> torch.Tensor:
    return torch.randn(256, WIDTH, device="cuda")


def train_plain(net: Net) -> tuple[list[torch.optim.Optimizer], Callable[[], None]]:
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def step() -> None:
        net(batch()).square().mean().backward()
        adamw.step()
        adamw.zero_grad()

    return [adamw], step


def train_side_stream(net: Net) -> tuple[list[torch.optim.Optimizer], Callable[[], None]]:
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-3)
    side = torch.cuda.Stream()

    def step() -> None:
        net(batch()).square().mean().backward()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            adamw.step()
        torch.cuda.current_stream().wait_stream(side)
        adamw.zero_grad()

    return [adamw], step


def train_two(net: Net) -> tuple[list[torch.optim.Optimizer], Callable[[], None]]:
    parameters = list(net.parameters())
    first = torch.optim.SGD(parameters[::2], lr=1e-3, momentum=0.9)
    second = torch.optim.AdamW(parameters[1::2], lr=1e-3)

    def step() -> None:
        net(batch()).square().mean().backward()
        second.step()
        first.step()
        first.zero_grad()
        second.zero_grad()

    return [first, second], step


def train_in_backward(net: Net) -> tuple[list[torch.optim.Optimizer], Callable[[], None]]:
    owners = {
        parameter: torch.optim.SGD([parameter], lr=1e-3, momentum=0.9)
        for parameter in net.parameters()
    }

    def hook(parameter: torch.Tensor) -> None:
        owners[parameter].step()  # type: ignore[index]
        owners[parameter].zero_grad()  # type: ignore[index]

    for parameter in owners:
        parameter.register_post_accumulate_grad_hook(hook)
    return list(owners.values()), lambda: net(batch()).square().mean().backward()


def train_accumulating(net: Net) -> tuple[list[torch.optim.Optimizer], Callable[[], None]]:
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        for _ in range(4):
            net(batch()).square().mean().backward()
        adamw.step()
        adamw.zero_grad()

    return [adamw], step


def train_compiled(net: Net) -> tuple[list[torch.optim.Optimizer], Callable[[], None]]:
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=True)
    inner = torch.compile(adamw.step)

    def step() -> None:
        net(batch()).square().mean().backward()
        inner()
        adamw.zero_grad()

    return [adamw], step


def can_compile() -> bool:
    """Whether there is what torch.compile needs for a GPU: triton, and the C compiler that it looks for."""
    compilers = (os.environ.get("CC", "gcc"), "clang")
    return find_spec("triton") is not None and any(map(shutil.which, compilers))


@pytest.mark.parametrize(
    "loop",
    [
        *(train_plain, train_side_stream, train_two, train_in_backward, train_accumulating),
        pytest.param(
            train_compiled,
            marks=pytest.mark.skipif(not can_compile(), reason="needs triton and a C compiler"),
        ),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_ways_to_train(
    tmp_path: Path, writer: DataStatesWriter, loop: Any, recompute: bool
) -> None:
    net = Net(recompute).cuda()
    optimizers, step = loop(net)
    step()
    for index in range(10):
        state = {
            "model": net.state_dict(),
            "optimizers": {
                f"{number}": {
                    f"{position}.{name}": value
                    for position, slots in each.state_dict()["state"].items()
                    for name, value in slots.items()
                }
                for number, each in enumerate(optimizers)
            },
        }
        expected = copied(state)
        future = dcp_datastates.async_save(state, tmp_path / f"{index}", writer=writer)
        step()
        step()
        future.upload_completion.result()
        assert differing(tmp_path / f"{index}", expected) == []
        # The BatchNorm's buffers and step counts on the host are all that is copied at the call.
        assert writer.last_save is not None
        assert writer.last_save.eager_bytes < writer.last_save.deferred_bytes / 100


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda w: w.add_(1),
    "_foreach_": lambda w: torch._foreach_mul_([w], 2.0),
    "out=": lambda w: torch.add(w, 1, out=w),
    ".data": lambda w: w.data.zero_(),
    "index_put_": lambda w: w.index_put_(
        (torch.arange(0, WIDTH, 2, device="cuda"),), w[:1].clone()
    ),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("window", ["backward", "immediate"])
def test_a_write_that_no_step_announces(
    tmp_path: Path, window: str, write: Callable[..., Any]
) -> None:
    """The save holds what was there at the call, or fails as torn."""
    net = Net().cuda()
    (adamw,), step = train_plain(net)
    step()
    prepared_engine()
    writer = DataStatesWriter(host_cache_size=CACHE, reads=window)
    for index in range(10):
        state = state_of(net, adamw)
        expected = copied(state)
        handle = dcp_datastates.async_save(state, tmp_path / f"{index}", writer=writer)
        with torch.no_grad():
            for parameter in net.layers.parameters():
                write(parameter)
        refused = ""
        try:
            handle.result()
        except dcp_datastates.errors.DataStatesError as error:
            refused = repr(error)
        if refused:
            assert "changed" in refused
        else:
            assert differing(tmp_path / f"{index}", expected) == []
    writer.close()


def test_restored_behind_what_the_stream_was_given(
    tmp_path: Path, writer: DataStatesWriter
) -> None:
    values = {"long": torch.randn(4096, 2048), "wide": torch.randn(64, 8192), "odd": torch.randn(7)}
    dcp.save(values, storage_writer=DataStatesWriter(tmp_path / "x", host_cache_size=CACHE))
    for _ in range(10):
        state = {name: torch.zeros_like(value, device="cuda") for name, value in values.items()}
        state["wide"] = torch.zeros(64, 9000, device="cuda")[:, :8192]
        torch.cuda._sleep(50_000_000)
        for tensor in state.values():
            tensor.fill_(9)
        dcp.load(state, storage_reader=DataStatesReader(tmp_path / "x"))
        for name, value in values.items():
            assert torch.equal(state[name].cpu(), value), name


def test_the_host_cache_is_pinned(writer: DataStatesWriter) -> None:
    native = prepared_engine()
    assert native.pin_fault is None, native.pin_fault.message
    assert native.pinned_bytes >= native.host_cache_bytes


class Counter(torch.optim.Optimizer):
    """Adds one to all that it owns, whatever the dtype."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for tensor in group["params"]:
                tensor.add_(1)


def test_thousands_of_small_tensors(tmp_path: Path, writer: DataStatesWriter) -> None:
    prepared_engine()
    # Elements, so that pieces of one memory begin at all alignments.
    sizes = (1, 3, 16, 17, 255, 1000, 1023, 4096, 4099, 7001, 16383, 16384, 16385, 40001) * 100
    owned = {
        dtype: torch.randint(100, (sum(sizes),), device="cuda").to(dtype)
        for dtype in (torch.bfloat16, torch.float32, torch.int8)
    }
    state = {
        f"{dtype}.{index}": piece
        for dtype, whole in owned.items()
        for index, piece in enumerate(whole.split(sizes))
    }
    counter = Counter(list(owned.values()), {})
    dcp_datastates.track(counter)
    stock = {name: torch.empty_like(value, device="cpu") for name, value in state.items()}
    for index in range(3):  # the last is read before it is planned
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / f"stock-{index}"))
        future = dcp_datastates.async_save(state, tmp_path / f"{index}", writer=writer)
        counter.step()
        future.upload_completion.result()
        dcp.load(stock, storage_reader=dcp.FileSystemReader(tmp_path / f"stock-{index}"))
        assert differing(tmp_path / f"{index}", stock) == []
        assert writer.last_save is not None
        assert writer.last_save.eager_bytes == 0


def test_a_captured_step(tmp_path: Path, writer: DataStatesWriter) -> None:
    """No hook is called when it is replayed: what it changes is copied at the call."""
    parameter = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    adamw = torch.optim.AdamW([parameter], lr=0.1, capturable=True)
    parameter.grad = torch.ones_like(parameter)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            adamw.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        adamw.step()
        with pytest.raises(ConfigurationError, match="captured"):
            dcp_datastates.async_save({"p": parameter}, tmp_path / "no", writer=writer)
    for index in range(20):
        expected = {"p": parameter.detach().clone()}
        future = dcp_datastates.async_save({"p": parameter}, tmp_path / f"{index}", writer=writer)
        graph.replay()
        graph.replay()
        future.upload_completion.result()
        assert differing(tmp_path / f"{index}", expected) == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU only")
def test_only_the_device_in_use_gets_a_context(tmp_path: Path) -> None:
    script = f"""
import torch, torch.distributed.checkpoint as dcp
from dcp_datastates import DataStatesWriter
torch.cuda.set_device(1)
state = {{"w": torch.randn(1 << 20, device="cuda:1")}}
assert not torch._C._cuda_hasPrimaryContext(0), "torch makes one itself"
dcp.async_save(state, storage_writer=DataStatesWriter({str(tmp_path / "x")!r})).result()
assert torch._C._cuda_hasPrimaryContext(1)
assert not torch._C._cuda_hasPrimaryContext(0)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize("optimizer", ["fused", "foreach", "plain"])
@pytest.mark.parametrize("window", ["backward", "immediate"])
def test_hundreds_of_saves_while_training(tmp_path: Path, optimizer: str, window: str) -> None:
    """The last of this file: it takes longest, and `make gpu-first` has no time to lose."""
    net = Net().cuda()
    options = {"fused": {"fused": True}, "foreach": {"foreach": True}, "plain": {"foreach": False}}
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-3, **options[optimizer])
    dcp_datastates.track(adamw)
    kept = DataStatesWriter(host_cache_size=CACHE, reads=window)  # type: ignore[arg-type]
    saves = []
    for index in range(60):
        net(batch()).square().mean().backward()
        adamw.step()
        adamw.zero_grad()
        state = state_of(net, adamw)
        expected = copied(state)
        path = tmp_path / f"{index % 3}"
        saves.append((path, expected, dcp_datastates.async_save(state, path, writer=kept)))
        if len(saves) == 3:
            for at, wanted, response in saves:
                response.upload_completion.result()
                assert differing(at, wanted) == []
            saves = []
    kept.close()
