"""Every in-place write that torch has, on every type of tensor, at every time of a save: the bytes of the call are
committed, or the save fails. The oracle is a copy of the bytes that is made at the call.
"""

import contextlib
import itertools
import re
import threading

import pytest
import torch
import torch.distributed as dist
from support.devices.writes import (
    COLUMNS,
    KINDS,
    ROWS,
    Owner,
    bytes_of,
    may_escape,
    outcome,
    plain,
    writes_to,
)
from support.state.checkpoints import CACHE
from support.state.wrapped import Blocks
from support.tiers import sampled
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp_datastates
from dcp_datastates.errors import SnapshotTornError
from dcp_datastates.staging import step_gate

pytestmark = pytest.mark.usefixtures("one_rank")


def _saved(tensor, path, **options):
    return dcp_datastates.async_save({"w": tensor}, path, host_cache_size=CACHE, **options)


@pytest.mark.parametrize("when", ["before", "before, audited", "during", "after"])
@pytest.mark.parametrize("all_writes", sampled([False, True], keep=[False]))
@pytest.mark.parametrize("kind", sampled(KINDS, keep=lambda kind: not kind.startswith("torchao")))
def test_a_write_around_the_reads_is_never_committed_in_part(kind, all_writes, when, tmp_path):
    """Before the reads, right after the call (the reads may come before it, after it, or both), or after them."""
    audit = when == "before, audited"
    reads = 600 if when.startswith("before") else "immediate"
    wrong = []
    for number, (name, write) in enumerate(writes_to(kind, all_writes).items()):
        tensor = KINDS[kind].make()
        owner = Owner(tensor)
        expected = bytes_of(tensor)[""]
        path = tmp_path / str(number)
        handle = _saved(KINDS[kind].given(tensor), path, reads=reads, audit=audit)
        if when == "after":
            handle.captured.result(60)
        with torch.no_grad(), contextlib.suppress(RuntimeError):  # a view, say, takes less
            write(KINDS[kind].target(tensor))
        after = bytes_of(tensor)[""]
        found = outcome(handle, tensor, expected, path)
        if when == "after":
            assert found == "right", name
        elif found == "WRONG" and (audit or not may_escape(kind, name, expected, after)):
            wrong.append(name)
        del owner
    assert not wrong


def _one_value(target):
    target.reshape(-1)[12_345] = 7.0


def _multiply_one(sharded):
    factor = torch.ones(ROWS * COLUMNS)
    factor[12_345] = 0.5
    mesh = sharded.device_mesh
    sharded.mul_(distribute_tensor(factor.view(ROWS, COLUMNS), mesh, [Shard(0)]))


SMALL = {
    "plain": _one_value,
    "plain, its .data in the state": _one_value,
    "DTensor": _multiply_one,
    "DTensor, by to_local()": lambda p: _one_value(p.to_local()),
    "wrapper, by a part": lambda p: _one_value(p.codes),
}


@pytest.mark.parametrize("kind", SMALL)
def test_a_write_of_one_value_that_torch_knows_of_is_seen(kind, tmp_path):
    tensor = KINDS[kind].make()
    owner = Owner(tensor)
    handle = _saved(KINDS[kind].given(tensor), tmp_path, reads=600)
    with torch.no_grad():
        SMALL[kind](tensor)
    with pytest.raises(SnapshotTornError, match="'w"):
        handle.result()
    assert owner


UNKNOWN = {
    ".data": lambda p: _one_value(p.data),
    "numpy": lambda p: p.detach().numpy().reshape(-1).__setitem__(12_345, 7.0),
    "a view of the memory": lambda p: memoryview(p.detach().numpy().reshape(-1)).__setitem__(
        12_345, 7.0
    ),
}


@pytest.mark.parametrize("write", UNKNOWN)
def test_an_audit_names_a_write_of_one_value_that_torch_does_not_know_of(write, tmp_path):
    tensor = plain()
    owner = Owner(tensor)
    handle = _saved(tensor.detach(), tmp_path, reads=600, audit=True)
    UNKNOWN[write](tensor)
    with pytest.raises(SnapshotTornError) as raised:
        handle.result()
    found = re.search(r"'w' .* in \[(\d+), (\d+)\)", str(raised.value))
    assert found
    assert 4 * 12_345 <= int(found[1]) < int(found[2]) <= 4 * 12_346
    assert owner


@pytest.mark.parametrize("kind", ["plain", "DTensor", "DTensor, by to_local()"])
def test_a_write_that_ends_after_the_reads_is_seen(kind, tmp_path):
    """Torch moves the counter when the kernel is done. The kernel changes one value at once, and then takes long.

    An operation on a DTensor keeps the GIL in torch 2.13, so that nothing of ours runs meanwhile; a newer one need not.
    """
    rows = 1 << 9
    mesh = init_device_mesh("cpu", (1,))
    dense = torch.rand(rows, 512)  # 1 MiB
    tensor = torch.nn.Parameter(
        dense if kind == "plain" else distribute_tensor(dense, mesh, [Replicate()])
    )
    target = tensor.to_local() if kind == "DTensor, by to_local()" else tensor
    owner = Owner(tensor)
    expected = bytes_of(tensor)[""]
    index = (torch.arange(64 * rows) % rows)[:, None].repeat(1, 512)
    added = torch.zeros(64 * rows, 512)
    if kind == "DTensor":
        index = distribute_tensor(index, mesh, [Replicate()])
        added = distribute_tensor(added, mesh, [Replicate()])
    with torch.no_grad():
        target.scatter_add_(0, index, added)  # DTensor plans an operation when it is first called
    (added.to_local() if kind == "DTensor" else added)[0, 17] = 1.0
    handle = _saved(tensor.detach(), tmp_path, reads=600)
    opener = threading.Timer(0.005, step_gate.open_windows)
    opener.start()
    with torch.no_grad():
        target.scatter_add_(0, index, added)
    opener.join()
    assert outcome(handle, tensor, expected, tmp_path) != "WRONG"
    assert owner


class InTwoCalls(Blocks):
    """Torch carries out its zero_() in Python: two operations, with a wait between them."""

    between = threading.Event()
    goes_on = threading.Event()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten.zero_.default:
            return super().__torch_dispatch__(function, types, args, kwargs)
        args[0].codes.zero_()
        cls.between.set()
        assert cls.goes_on.wait(60)
        args[0].scales.zero_()
        return args[0]


@pytest.mark.parametrize("reads_end_between", [True, False])
def test_a_write_that_torch_carries_out_in_python_is_seen(reads_end_between, tmp_path):
    InTwoCalls.between.clear()
    InTwoCalls.goes_on.clear()
    tensor = InTwoCalls(torch.rand(ROWS, COLUMNS), torch.rand(ROWS // 2))
    owner = Owner(tensor)
    handle = _saved(tensor.detach(), tmp_path, reads=600)
    thread = threading.Thread(target=tensor.zero_)
    thread.start()
    assert InTwoCalls.between.wait(60)
    if reads_end_between:
        step_gate.open_windows()
        with contextlib.suppress(SnapshotTornError):
            handle.captured.wait(60)
    InTwoCalls.goes_on.set()
    thread.join()
    with pytest.raises(SnapshotTornError):
        handle.result()
    assert owner


@pytest.mark.parametrize("first", [True, False])
def test_weights_that_are_swapped_out_and_in_again_while_they_are_read_are_not_committed(
    first, tmp_path
):
    """With an audit, as the reads may meet a swap in the middle, in a few bytes."""
    head = torch.nn.Parameter(torch.rand(1 << 20))  # 4 MiB
    body = torch.nn.Parameter(torch.rand(12 << 20))  # 48 MiB, more than the cache
    owners = [Owner(head), Owner(body)]
    state = {"head": head, "body": body} if first else {"body": body, "head": head}
    expected = {name: bytes_of(value)[""] for name, value in state.items()}
    handle = dcp_datastates.async_save(
        state, tmp_path, host_cache_size="32MiB", reads="immediate", audit=True
    )
    kept = head.detach().clone()
    while not handle.captured.done():
        head.data.add_(1)
        head.data.copy_(kept)
    try:
        handle.result()
    except SnapshotTornError:
        pass
    else:
        found = dcp_datastates.load(tmp_path)
        assert {name: bytes_of(found[name])[""] for name in state} == expected
    assert owners


LOADS = {
    "load": lambda state, path: dcp_datastates.load(path, state),
    "dcp.load": lambda state, path: dist.checkpoint.load(
        state, storage_reader=dcp_datastates.DataStatesReader(path)
    ),
}


@pytest.mark.parametrize("audit", [False, True])
@pytest.mark.parametrize(
    ("kind", "load"),
    sampled(
        itertools.product(["plain", "plain, by .data", "DTensor", "DTensor, by .data"], LOADS),
        keep=[("plain, by .data", "load"), ("DTensor", "dcp.load")],
    ),
)
def test_a_load_waits_for_the_reads_of_what_it_overwrites(kind, load, audit, tmp_path):
    tensor = KINDS[kind].make()
    owner = Owner(tensor)
    dcp_datastates.save({"w": tensor.detach() + 1}, tmp_path / "other", host_cache_size=CACHE)
    expected = bytes_of(tensor)[""]
    path = tmp_path / "mine"
    handle = _saved(tensor.detach(), path, reads=600, audit=audit)
    LOADS[load]({"w": KINDS[kind].target(tensor).detach()}, tmp_path / "other")
    assert bytes_of(tensor)[""] != expected
    assert outcome(handle, tensor, expected, path) == "right"
    assert owner


def test_after_a_torn_save_the_tensors_of_that_owner_are_copied(tmp_path, caplog):
    tensor, other = plain(), plain()
    owner, another = Owner(tensor), Owner(other)
    outcomes = []
    for number in range(3):
        expected = {"w": tensor.detach().clone(), "other": other.detach().clone()}
        handle = dcp_datastates.async_save(
            {"w": tensor, "other": other}, tmp_path / str(number), host_cache_size=CACHE, reads=600
        )
        tensor.data.clamp_(0.25, 0.75 - number / 10)
        outcomes.append(handle.committed.exception())
        if number:
            found = dcp_datastates.load(tmp_path / str(number))
            assert all(torch.equal(found[name], value) for name, value in expected.items())
            assert handle.stats.eager_bytes == handle.stats.deferred_bytes == tensor.nbytes
    assert [type(outcome) for outcome in outcomes] == [SnapshotTornError, type(None), type(None)]
    assert sum("copy the tensors" in message for message in caplog.messages) == 1
    dcp_datastates.track(owner)
    handle = dcp_datastates.async_save(
        {"w": tensor}, tmp_path / "again", host_cache_size=CACHE, reads=600
    )
    assert handle.stats.deferred_bytes == tensor.nbytes
    handle.result()
    assert another
