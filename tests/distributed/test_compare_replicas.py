"""``compare_replicas``: what several ranks hold alike is compared byte for byte, a part at each save."""

from __future__ import annotations

import logging
import random
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.jobs.groups import own_group
from support.jobs.ranks import ranks, run_on_ranks
from support.state.checkpoints import CACHE, assert_same, load_everything, raises
from support.stores.server import endpoint, use
from support.waiting import lines
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dcp_datastates as ds
from dcp_datastates import DataStatesSavePlanner, DataStatesWriter
from dcp_datastates.checkpoints.find import newest_whole
from dcp_datastates.errors import CheckpointCorruptError, ConfigurationError, ReplicasDifferError
from dcp_datastates.storage.object_path import locate

TURNS = 4


class _Model:
    """Weights of many sizes, dtypes and strides that an optimizer owns, the same on all ranks."""

    def __init__(self):
        torch.manual_seed(5)
        tensors = [torch.randn(count, 100) for count in (3, 700, 40, 9000, 1)]
        tensors += [torch.randn(300, 600).t(), torch.randn(7).bfloat16(), torch.randn(())]
        self.weights = {f"w{n}": torch.nn.Parameter(each) for n, each in enumerate(tensors)}
        self.optimizer = torch.optim.SGD(self.weights.values(), lr=0.0)
        ds.track(self.optimizer)

    def state(self, **more):
        return {**{name: weight.detach() for name, weight in self.weights.items()}, **more}

    def flip(self, name, at):
        """Flip a bit of the ``at``-th element, in the order in which elements are stored."""
        with torch.no_grad():
            weight = self.weights[name]
            place = [int(each) for each in torch.unravel_index(torch.tensor(at), weight.shape)]
            bits = weight[tuple(place)].clone().reshape(1).view(torch.uint8)
            bits[0] ^= 1
            weight[tuple(place)] = bits.view(weight.dtype).reshape(())


def _save(state, path, turns=TURNS, planner=None, **options):
    options = {"reads": "immediate", "host_cache_size": CACHE, **options}
    saved = ds.async_save(state, path, compare_replicas=turns, planner=planner, **options)
    saved.upload_completion.result(60)
    dist.barrier()


def _good(root):
    return ds.latest(root, verify="replicas")


@ranks(3)
@pytest.mark.parametrize("reads", ["immediate", "blocking"])
@pytest.mark.parametrize("seed", range(3))
def test_one_flipped_bit_is_found_within_n_saves(reads, seed, shared_dir):
    chance, model, planner = random.Random(seed), _Model(), DataStatesSavePlanner()
    before = TURNS + chance.randrange(TURNS)
    for number in range(before):
        _save(model.state(n=number), shared_dir / f"{number}", planner=planner, reads=reads)
    assert _good(shared_dir) == shared_dir / f"{before - TURNS}"
    name = chance.choice(list(model.weights))
    at = chance.randrange(model.weights[name].numel())
    bad = chance.randrange(3)
    if dist.get_rank() == bad:
        model.flip(name, at)
    found = None
    for number in range(before, before + TURNS):
        try:
            _save(model.state(n=number), shared_dir / f"{number}", planner=planner, reads=reads)
        except ReplicasDifferError as error:
            found = number, str(error)
            break
    assert found is not None, (name, at)
    number, text = found
    others = [each for each in range(3) if each != bad]
    assert f"'{name}'" in text, text
    if "different bytes" in text:  # not by samples
        assert f": rank {bad} (" in text, text
        assert f") and rank {others[0]} (" in text, text
        begin, end = re.search(rf"'{name}', bytes (\d+) to (\d+)", text).groups()
        assert int(begin) <= at * model.weights[name].element_size() < int(end), text
        assert f"equal in the save to {shared_dir / str(number - TURNS)}" in text, text
        assert _good(shared_dir) == shared_dir / f"{number - TURNS}"
    dist.barrier()


@ranks(2)
def test_every_tensor_is_compared_from_its_first_byte_to_its_last(shared_dir):
    model, planner = _Model(), DataStatesSavePlanner()
    for name, weight in model.weights.items():
        _save(model.state(), shared_dir / "c", turns=1, planner=planner)
        for at in sorted({0, weight.numel() // 2, weight.numel() - 1}):
            if dist.get_rank():
                model.flip(name, at)
            with raises(ReplicasDifferError, f"'{name}'"):
                _save(model.state(), shared_dir / "c", turns=1, planner=planner)
            dist.barrier()
            if dist.get_rank():
                model.flip(name, at)
    _save(model.state(), shared_dir / "c", turns=1, planner=planner)
    assert_same(load_everything(shared_dir / "c"), model.state())
    assert _good(shared_dir) == shared_dir / "c"
    dist.barrier()


@ranks(4)
@pytest.mark.parametrize("rows", [4, 3000])
def test_shards_and_their_replicas(rows, shared_dir):
    """In HSDP, also a small shard, which one rank writes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    local = torch.full((rows, 200), 1.0)
    state = {"w": DTensor.from_local(local, mesh, [Replicate(), Shard(0)]), "v": torch.ones(3)}
    planner = DataStatesSavePlanner()
    for number in range(3):
        _save(state, shared_dir / f"{number}", turns=1, planner=planner)
    if dist.get_rank() == 3:
        local.view(torch.int32)[-1, -1] ^= 1
    with raises(ReplicasDifferError, "rank 1 (", "rank 3 (", "'w'"):
        _save(state, shared_dir / "3", turns=1, planner=planner)
    dist.barrier()
    assert _good(shared_dir) == shared_dir / "2"
    dist.barrier()


def _by_dcp(root, url=None):
    if url is not None:
        use(url)
    model, planner = _Model(), DataStatesSavePlanner()
    for number in range(3):
        if number == 2 and dist.get_rank():
            model.flip("w3", 77_777)
        by = DataStatesWriter(
            f"{root}/{number}", compare_replicas=1, reads=0.1, host_cache_size=CACHE
        )
        options = {"storage_writer": by, "planner": planner, "process_group": own_group()}
        if number < 2:
            dcp.async_save(model.state(), **options).result()
            by.committed.result(60)
            continue
        with raises(ReplicasDifferError, "'w3', bytes 0 to", f"{number - 1}"):
            dcp.async_save(model.state(), **options).result()
            by.committed.result(60)
        by.close()
    dist.barrier()
    assert str(_good(root)) == f"{root}/1"


def test_also_in_dcp_s_own_calls_where_tensors_are_read_later(shared_dir):
    run_on_ranks(2, _by_dcp, root=shared_dir)


def test_also_in_a_store(s3_root):
    run_on_ranks(2, _by_dcp, root=s3_root, url=endpoint())


@ranks(2)
def test_what_nothing_declares_equal_is_named_and_saved(shared_dir):
    mine = torch.zeros(3000, 200)
    mine[-1, -1] = dist.get_rank()
    with lines(logging.WARNING) as said:
        for number in range(2):
            _save(_Model().state(counts=mine), shared_dir / f"{number}", turns=1)
    is_named = any("different values of 'counts', bytes" in line for line in said)
    assert is_named == (dist.get_rank() == 0), said
    assert load_everything(shared_dir / "1")["counts"][-1, -1] == 0
    assert _good(shared_dir) == shared_dir / "1"
    dist.barrier()


@ranks(2)
def test_what_another_plan_has_compared_does_not_count(shared_dir):
    """As after a restart at another size."""
    model = _Model()
    for number in range(2):
        _save(model.state(), shared_dir / f"{number}", turns=2)
    assert _good(shared_dir) == shared_dir / "0"
    for number in range(2, 4):
        _save(model.state(more=torch.ones(5)), shared_dir / f"{number}", turns=2)
        dist.barrier()
        assert _good(shared_dir) == shared_dir / ("0" if number == 2 else "2")
        dist.barrier()


@ranks(2)
def test_what_was_not_compared_is_not_known_to_be_equal(shared_dir):
    model = _Model()
    _save(model.state(), shared_dir / "a", turns=None)
    with raises(CheckpointCorruptError, "not compared", "compare_replicas"):
        _good(shared_dir)
    dist.barrier()
    _save(model.state(), shared_dir / "b", turns=2)
    with raises(CheckpointCorruptError, "1 of 2 parts"):
        _good(shared_dir)
    with raises(ConfigurationError, "dedup_save_to_lowest_rank"):
        planner = torch.distributed.checkpoint.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        _save(model.state(), shared_dir / "c", planner=planner)
    dist.barrier()


@ranks(2)
def test_nothing_that_is_compared_is_written(shared_dir):
    model, planner = _Model(), DataStatesSavePlanner()
    sizes = []
    for turns in (None, 1):
        path = shared_dir / f"{turns}"
        _save(model.state(), path, turns=turns, planner=planner)
        files = list(path.rglob("*.safetensors"))
        sizes.append((len(files), sum(each.stat().st_size for each in files)))
    assert sizes[0] == sizes[1]
    dist.barrier()


def test_alone_there_are_no_replicas(tmp_path):
    ds.save({"w": torch.ones(100_000)}, tmp_path / "c", compare_replicas=10)
    assert ds.latest(tmp_path, verify="replicas") == tmp_path / "c"


@pytest.mark.parametrize("turns", [0, -1, 101, 2.5, "ten", True])
def test_what_is_no_number_of_saves_is_refused(turns, tmp_path):
    with pytest.raises(ConfigurationError, match="compare_replicas"):
        ds.DataStatesWriter(tmp_path, compare_replicas=turns)


@ranks(2)
def test_a_manager_keeps_what_is_known_to_be_equal_and_goes_back_to_it(shared_dir):
    model = torch.nn.Linear(400, 400)
    torch.nn.init.ones_(model.weight)
    options = {"compare_replicas": 3, "verify": "replicas", "host_cache_size": CACHE}

    def manager():
        return ds.CheckpointManager(shared_dir, every=1, keep=1, save_last=False, **options)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    state = {"model": model, "optimizer": optimizer}
    with manager() as saves:
        for step in range(1, 8):
            saves.save(step, state)
            saves.wait()
    dist.barrier()
    kept = sorted(path.name for path in shared_dir.iterdir() if not path.name.startswith("."))
    assert [name[-1] for name in kept] == ["5", "6", "7"], kept
    dist.barrier()
    with manager() as saves:
        assert saves.restore_latest(state) == 5
    dist.barrier()


@ranks(2)
@pytest.mark.parametrize(
    "how", [{"enable_plan_caching": False}, {"flatten_state_dict": False}, "conj", "a new one"]
)
def test_whatever_the_planner_and_the_state(how, shared_dir):
    """Also where it is not known where the tensors are in the state."""
    model, more = _Model(), {}
    if how == "conj":
        more["c"] = torch.ones(9, dtype=torch.complex64).conj()
    options = how if isinstance(how, dict) else {}
    for number in range(3):
        planner = DataStatesSavePlanner(**options)
        _save(model.state(**more), shared_dir / f"{number}", turns=2, planner=planner)
    assert _good(shared_dir) == shared_dir / "1"
    if dist.get_rank():
        for name in model.weights:
            model.flip(name, 0)
    failed = 0
    for _ in range(2):
        try:
            planner = DataStatesSavePlanner(**options)
            _save(model.state(**more), shared_dir / "bad", turns=2, planner=planner)
        except ReplicasDifferError:
            failed += 1
    assert failed
    dist.barrier()


@ranks(2)
def test_a_planner_of_ones_own_is_refused(shared_dir):
    class Own(DataStatesSavePlanner):
        def resolve_data(self, write_item):
            return super().resolve_data(write_item)

    with raises(ConfigurationError, "a planner of your own"):
        _save(_Model().state(), shared_dir / "c", planner=Own())
    dist.barrier()


@ranks(2)
def test_what_was_compared_counts_though_a_checkpoint_is_left_out(shared_dir):
    model = _Model()
    for number in range(6):
        _save(model.state(), shared_dir / f"{number}", turns=3)
    for left_out, newest in (((), "3"), (("3",), "2"), (("5",), "3")):
        found = newest_whole([locate(shared_dir)], "replicas", leave_out=left_out)
        assert found == [shared_dir / newest]
    dist.barrier()


@ranks(2)
def test_after_a_load_what_was_saved_before_is_not_known_by_what_is_saved_later(shared_dir):
    """The load makes replicas equal that were not."""
    model = _Model()
    for number in range(3):
        _save(model.state(), shared_dir / f"{number}", turns=2)
    ds.load(shared_dir / "2", model.state())
    _save(model.state(), shared_dir / "3", turns=2)
    assert _good(shared_dir) == shared_dir / "1"
    _save(model.state(), shared_dir / "4", turns=2)
    assert _good(shared_dir) == shared_dir / "3"
    dist.barrier()


@ranks(2)
def test_a_manager_ends_the_job_whose_replicas_differ(shared_dir):
    """Though saves in between, which compare other parts, are committed."""
    model = _Model()
    if dist.get_rank():
        model.flip("w3", 0)
    options = {"compare_replicas": 3, "max_failures": 2, "host_cache_size": CACHE}
    manager = ds.CheckpointManager(shared_dir, every=1, save_last=False, **options)
    committed = 0
    with raises(ReplicasDifferError, "'w3'"):
        for step in range(1, 20):
            manager.save(step, model.state())
            manager.wait()
            committed += 1
    assert 2 < committed < 8
    manager.close()
    dist.barrier()
