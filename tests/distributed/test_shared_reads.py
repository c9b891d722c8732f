"""Ranks read from storage once what several of them need, and pass it on; whatever happens on the way, none hangs, and
none loads other bytes.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.jobs.groups import gathered, own_group
from support.jobs.processes import run_ranks
from support.jobs.ranks import ranks, run_on_ranks
from support.state.checkpoints import (
    assert_same,
    async_save,
    causes,
    load,
    load_by_both,
    load_everything,
    raises,
    save,
    zeros,
)
from support.state.files import data_files, flip_bit
from support.state.states import filled
from support.stores.harm import HarmProxy, flipped_in_each, held_after
from support.stores.server import endpoint, use
from support.tiers import tries
from support.waiting import await_that
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp_datastates
from dcp_datastates import CheckpointManager, DataStatesReader
from dcp_datastates.errors import CheckpointCorruptError, IncompatibleStateError
from dcp_datastates.sharing import shared_reads
from dcp_datastates.sharing.shared_reads import OwnUnits, SharedReads
from dcp_datastates.storage.object_path import locate
from dcp_datastates.wire import line

THREADS = "dcp_datastates-sharing"

LAYOUTS = {
    "ddp": ((4,), [Replicate()], 4),
    "hsdp": ((2, 2), [Replicate(), Shard(0)], 2),
    "tp": ((4,), [Shard(1)], 1),
    "fsdp": ((4,), [Shard(0)], 1),
}
"""Mesh and placements on four ranks, and on how many of them each byte is."""


def laid_out(full, shape, placements):
    if placements == [Replicate()]:
        return {name: tensor.clone() for name, tensor in full.items()}
    mesh = init_device_mesh("cpu", shape)
    return {
        name: distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None)
        for name, tensor in full.items()
    }


def state(layout, tensors=5, rows=2051):
    """About 8 MiB in each tensor."""
    shape, placements, _ = LAYOUTS[layout]
    full = {f"w{n}": filled((rows, 1024), torch.float32, n) for n in range(tensors)}
    return laid_out(full, shape, placements)


def total(value):
    """The sum over all ranks."""
    return sum(gathered(value))


def bytes_read(run):
    """The bytes that all ranks together have read from files while they ran ``run``."""
    dist.barrier()
    before = _read_so_far()
    run()
    return total(_read_so_far() - before)


def _read_so_far():
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_several_ranks_need_is_read_once(layout, shared_dir):
    expected, copies = state(layout), LAYOUTS[layout][2]
    save(expected, shared_dir / "c")
    unique = sum(file.stat().st_size for file in data_files(shared_dir / "c"))
    load(zeros(expected), shared_dir / "c", share_reads=True)  # imports modules
    read = {}
    for share in (True, False, None):
        target = zeros(expected)
        read[share] = bytes_read(lambda t=target, s=share: load(t, shared_dir / "c", share_reads=s))
        assert_same(target, expected)
    assert unique <= read[True] <= 1.05 * unique
    assert read[False] >= copies * unique
    assert abs(read[None] - read[False]) < 100_000  # the directory is on a local disk


def _random_layout(draw: random.Random) -> tuple[tuple[int, ...], list]:
    shape = draw.choice([(4,), (2, 2)])
    return shape, [draw.choice([Replicate(), Shard(0), Shard(1)]) for _ in shape]


SHAPES = [(1, 5), (40, 3), (300, 7000), (7, 900_000), (3000, 1000), (0, 4), (3, 0), (5, 33, 7)]
DTYPES = [torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.complex64]


def _any_layout(seed: int, root: Path) -> None:
    draw, path = random.Random(seed), root / f"c{seed}"
    full = {
        f"t{number}": filled(draw.choice(SHAPES), draw.choice(DTYPES), seed + number)
        for number in range(draw.randint(1, 12))
    }
    saved, expected = (laid_out(full, *_random_layout(draw)) for _ in range(2))
    if seed % 2:
        async_save(saved, path, group=own_group(), reads="immediate").result(60)
    else:
        save(saved, path)
    for share in (True, None):
        target = zeros(expected)
        load_by_both(target, path, share_reads=share)
        assert_same(target, expected)
    if dist.get_rank() == 0:
        assert_same(load_everything(path), full)


@pytest.mark.parametrize("count", tries(2, 24))
def test_any_layout_loads_as_any_other(count, shared_dir):
    for seed in range(count):
        run_on_ranks(4, _any_layout, seed=seed, root=shared_dir)


@ranks(4)
@pytest.mark.parametrize("harm", ["flipped", "held"])
def test_no_rank_loads_what_was_damaged_on_the_way_or_waits_for_what_does_not_come(
    harm, shared_dir
):
    expected = state("ddp")
    save(expected, shared_dir / "c")
    target, links, listen = zeros(expected), [], shared_reads.listen

    def listen_at_link(host):
        """Other ranks reach this one through a link that does harm."""
        listening, address = listen(host)
        links.append(HarmProxy(address.port, address.host))
        links[-1].down = flipped_in_each if harm == "flipped" else held_after(100)
        return listening, address._replace(port=links[0].port)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_reads, "listen", listen_at_link)
        patch.setattr(shared_reads, "_ANSWER_SECONDS", 1.0)
        load(target, shared_dir / "c", share_reads=True)
    for link in links:
        link.close()
    assert_same(target, expected)
    assert total(sum(link.harmed for link in links)) > 0


@ranks(4)
def test_no_rank_loads_what_another_has_damaged_in_its_memory(shared_dir):
    expected = state("hsdp")
    save(expected, shared_dir / "c")
    target, damaged = zeros(expected), 0
    taken = OwnUnits.taken

    @contextlib.contextmanager
    def damage(self, *arguments):
        nonlocal damaged
        with taken(self, *arguments) as data:
            damaged += data is not None
            yield data and memoryview(bytes([data[0] ^ 1]) + bytes(data[1:]))

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(OwnUnits, "taken", damage)
        load(target, shared_dir / "c", share_reads=True)
    assert_same(target, expected)
    assert total(damaged) > 0


@ranks(4)
def test_a_damaged_file_is_named_on_all_ranks(shared_dir):
    expected = state("ddp", tensors=2)
    save(expected, shared_dir / "c")
    dist.barrier()
    file = data_files(shared_dir / "c")[0]
    if dist.get_rank() == 0:
        flip_bit(file, file.stat().st_size // 2)
    dist.barrier()
    with pytest.raises(CheckpointException) as caught:
        load(zeros(expected), shared_dir / "c", share_reads=True)
    found = causes(caught.value)
    assert len(found) == 4
    assert all(isinstance(each, CheckpointCorruptError) for each in found)
    assert all(file.name in str(each) and "w" in str(each) for each in found)


@ranks(4)
def test_the_failure_of_one_rank_fails_all_by_name_and_the_others_have_read(shared_dir):
    expected = state("ddp")
    save(expected, shared_dir / "c")
    target = zeros(expected)
    if dist.get_rank() == 2:
        target["w1"] = target["w1"].double()
    with raises(IncompatibleStateError, "'w1' was saved as torch.float32"):
        load(target, shared_dir / "c", share_reads=True)
    if dist.get_rank() != 2:
        assert_same(target, expected)


def _listening() -> int:
    """How many sockets of this process take connections."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as each:
            found += each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return found


@ranks(4)
def test_a_load_that_fails_before_it_reads_leaves_no_socket(shared_dir):
    expected = state("ddp", tensors=2)
    save(expected, shared_dir / "c")
    load(zeros(expected), shared_dir / "c", share_reads=False)  # opens what stays
    before, kept = _listening(), []
    for _ in range(2):
        target = zeros(expected)
        if dist.get_rank() == 2:
            target["missing"] = torch.zeros(3)
        with pytest.raises(IncompatibleStateError) as caught:
            dcp_datastates.load(shared_dir / "c", target, share_reads=True)
        kept.append(caught.value)
    await_that(lambda: _listening() == before)


class _PlansAnew(DefaultLoadPlanner):
    """Makes a new plan of what the coordinator said, and reads when all others have read."""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return LoadPlan(new_plan.items)

    def resolve_tensor(self, read_item):
        if read_item.dest_index.fqn == "w0":
            dist.barrier()
        return super().resolve_tensor(read_item)


class _ReadsFirst(DefaultLoadPlanner):
    def commit_tensor(self, read_item, tensor) -> None:
        if read_item.dest_index.fqn == "w0":  # all are committed at once
            dist.barrier()


@ranks(4)
def test_a_rank_whose_planner_forgets_what_it_shares_is_not_waited_for(shared_dir):
    expected = state("ddp")
    save(expected, shared_dir / "c")
    target = zeros(expected)
    planner = _PlansAnew() if dist.get_rank() == 1 else _ReadsFirst()
    reader = DataStatesReader(shared_dir / "c", share_reads=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_reads, "_ANSWER_SECONDS", 3600.0)
        patch.setattr(line, "PROGRESS_SECONDS", 3600.0)
        dcp.load(target, storage_reader=reader, planner=planner)
    assert_same(target, expected)


def kill_one_that_passes_on(root, killed):
    """Rank ``killed`` is killed when another asks it for the third time. Returns whether this rank has read all."""
    expected = state("ddp")
    save(expected, f"{root}/c")
    target, asked, has_read = zeros(expected), 0, False
    taken, read_data = OwnUnits.taken, DataStatesReader.read_data

    @contextlib.contextmanager
    def take(self, *arguments):
        nonlocal asked
        with taken(self, *arguments) as data:
            yield data
        asked += killed == dist.get_rank()
        if asked > 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def read(self, *arguments):
        nonlocal has_read
        future = read_data(self, *arguments)
        assert_same(target, expected)
        has_read = True
        return future

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OwnUnits, "taken", take)
        patch.setattr(DataStatesReader, "read_data", read)
        with contextlib.suppress(Exception):  # the ranks' last gather fails
            load(target, f"{root}/c", share_reads=True)
    return has_read


def test_a_rank_that_is_killed_keeps_no_other_from_reading(tmp_path):
    ended = run_ranks(
        f"{__name__}:kill_one_that_passes_on", 4, tmp_path, root=str(tmp_path), killed=1
    )
    assert ended[1].killed
    assert all(rank.result() for rank in ended if rank.rank != 1)


@ranks(3)
def test_only_ranks_that_share_read_for_each_other(shared_dir):
    expected = state("ddp", tensors=2)
    save(expected, shared_dir / "c")
    load(zeros(expected), shared_dir / "c", share_reads=True)
    target = zeros(expected)
    share = dist.get_rank() != 1
    read = bytes_read(lambda: load(target, shared_dir / "c", share_reads=share))
    assert_same(target, expected)
    unique = sum(file.stat().st_size for file in data_files(shared_dir / "c"))
    assert 2 * unique <= read <= 2.1 * unique


@ranks(4)
@pytest.mark.parametrize("by_dcp", [True, False])
def test_when_all_have_all_no_thread_and_no_connection_is_left(by_dcp, shared_dir):
    expected = state("ddp", tensors=2)  # of three units: one of the ranks has none
    save(expected, shared_dir / "c")
    before = set(threading.enumerate())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_reads, "_KEPT_SECONDS", 3600.0)
        if not by_dcp and dist.get_rank() == 3:  # it takes nothing of what the others read for it
            patch.setattr(SharedReads, "_asked", lambda *_: None)
        for _ in range(3):
            target = zeros(expected)
            if by_dcp:
                load(target, shared_dir / "c", share_reads=True)
            else:
                dcp_datastates.load(shared_dir / "c", target, share_reads=True)
            assert_same(target, expected)

    def left():  # those of earlier tests may still keep what was not taken
        return [t for t in {*threading.enumerate()} - before if t.name.startswith(THREADS)]

    await_that(lambda: not left())


@ranks(4)
def test_the_manager_passes_the_option_on(shared_dir):
    expected = state("ddp", tensors=2)
    with CheckpointManager(shared_dir / "run", every=1, host_cache_size="64MiB") as manager:
        manager.save(1, expected).result(60)
    unique = sum(file.stat().st_size for file in data_files(shared_dir / "run"))
    read = {}
    for share in (True, True, False):
        target = zeros(expected)
        with CheckpointManager(shared_dir / "run", every=1, host_cache_size="64MiB") as manager:
            read[share] = bytes_read(
                lambda m=manager, t=target, s=share: m.restore(1, t, share_reads=s)
            )
        assert_same(target, expected)
    assert read[True] < 1.2 * unique
    assert read[False] > 3.9 * unique


def _reads_objects_once(url: str, root: str) -> None:
    use(url)
    expected = {**state("ddp", tensors=2), "step": 7}
    dcp_datastates.save(expected, f"{root}/c", host_cache_size="64MiB")
    store = locate(root).store
    get_range, fetched = store.get_range, []

    def counted(key, begin, end):
        data = get_range(key, begin, end)
        fetched.append(memoryview(data).nbytes)
        return data

    store.get_range = counted
    read = {}
    for share in (None, False):
        fetched.clear()
        target = {**zeros(expected), "step": 0}
        dcp_datastates.load(f"{root}/c", target, share_reads=share)
        assert_same(target, expected)
        read[share] = total(sum(fetched))
    store.get_range = get_range
    unique = sum(tensor.nbytes for name, tensor in expected.items() if name != "step")
    assert unique <= read[None] <= 1.05 * unique
    assert read[False] >= 4 * unique


def test_by_default_objects_are_read_once(s3_root):
    run_on_ranks(4, _reads_objects_once, url=endpoint(), root=s3_root)
