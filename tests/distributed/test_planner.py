"""DataStatesSavePlanner among ranks: shares, what travels, what is remembered, and what is loaded from it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import pickle
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.checkpoints import (
    CACHE,
    assert_same,
    bits,
    clone,
    load,
    load_everything,
    raises,
    zeros,
)
from support.failing import armed_on
from support.groups import own_group
from support.planners import own_step
from support.ranks import ranks
from support.residue import Residue, assert_nothing_left
from support.states import filled
from support.stopping import silence
from support.tiers import sampled
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp_datastates
from dcp_datastates import (
    ConfigurationError,
    DataStatesError,
    DataStatesReader,
    DataStatesSavePlanner,
    DataStatesWriter,
)

SMALL = 600
"""Bytes: what a rank sends, or is sent, that has nothing new to say."""


def _spied(body):
    """Planners that were given to :func:`_spy` note how large their plans are, in bytes as DCP pickles them."""

    def create_local_plan(plain, planner):
        plan = plain(planner)
        planner.offered.append(len(pickle.dumps(plan)))
        return plan

    def finish_plan(plain, planner, plan):
        planner.answered.append(len(pickle.dumps(plan)))
        return plain(planner, plan)

    @functools.wraps(body)
    def test(**kwargs):
        with (
            own_step("create_local_plan", create_local_plan),
            own_step("finish_plan", finish_plan),
        ):
            body(**kwargs)

    return test


def _spy(planner):
    planner.offered, planner.answered = [], []
    return planner


def _saver(path, **options):
    return DataStatesWriter(path, host_cache_size=CACHE, read_window="immediate", **options)


def _save(state, by, planner, path=None):
    """Saves; whether it was steady on this rank, and whether all ranks agree."""
    response = dcp_datastates.async_save(state, path, writer=by, planner=planner)
    response.upload_completion.result(60)
    steady = [None] * dist.get_world_size()
    dist.all_gather_object(steady, by.last_save.steady)
    return by.last_save.steady


def _state(number, rank=None, count=6):
    rank = dist.get_rank() if rank is None else rank
    return {
        "model": {
            f"r{rank}.w{i}": filled((64, 32), torch.float32, number + i) for i in range(count)
        },
        "shared": filled((3000, 100), torch.float32, number),
        "step": number,
    }


def _owned(state):
    """The same values, as an optimizer's parameters: the same on all ranks, as far as a plain tensor can say so. And
    the optimizer, to be kept.
    """
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in state.items()}
    optimizer = torch.optim.SGD(weights.values(), lr=0.0)
    dcp_datastates.track(optimizer)
    return {name: weight.detach() for name, weight in weights.items()}, optimizer


def _everything(path):
    """All that is committed there, on one rank alone."""
    found = load_everything(path)
    dist.barrier()
    return found


@ranks(4)
@_spied
def test_a_save_like_the_one_before_sends_bytes_and_not_plans(shared_dir):
    planner = _spy(DataStatesSavePlanner())
    by = _saver(shared_dir / "c")
    for number in range(4):
        steady = _save(_state(number, count=200), by, planner)
        assert steady == (number > 0)
    assert planner.offered[0] > 5000
    assert max(planner.offered[1:]) < SMALL
    assert max(planner.answered[1:]) < SMALL
    loaded = zeros(_state(3, count=200))
    assert_same(load(loaded, shared_dir / "c"), _state(3, count=200))


@ranks(4)
@_spied
def test_a_change_on_one_rank_sends_that_ranks_plan_alone(shared_dir):
    planner, by = _spy(DataStatesSavePlanner()), _saver(shared_dir / "c")
    for number in range(2):
        _save(_state(number, count=100), by, planner)
    mine = dist.get_rank() == 2
    changed = _state(2, count=101 if mine else 100)
    _save(changed, by, planner)
    assert (planner.offered[-1] > SMALL) == mine
    assert _save(_state(3, count=101 if mine else 100), by, planner)
    state = _state(3, count=101 if mine else 100)
    assert_same(load(zeros(state), shared_dir / "c"), state)
    # Back again: nothing is forgotten.
    assert _save(_state(4, count=100), by, planner)
    assert planner.offered[-1] < SMALL
    assert_same(load(zeros(_state(4, count=100)), shared_dir / "c"), _state(4, count=100))


@ranks(2)
@_spied
def test_state_dicts_that_alternate_do_not_push_each_other_out(shared_dir):
    planner = _spy(DataStatesSavePlanner())
    model, optimizer = _saver(shared_dir / "m"), _saver(shared_dir / "o")
    for number in range(4):
        first = _save({"model": _state(number)}, model, planner)
        second = _save({"optim": _state(number, count=9)}, optimizer, planner)
        assert first == second == (number > 0)
    assert_same(
        load(zeros({"optim": _state(3, count=9)}), shared_dir / "o"), {"optim": _state(3, count=9)}
    )


@ranks(2)
def test_two_writers_and_two_planners_interleaved(shared_dir):
    planners = [DataStatesSavePlanner(), DataStatesSavePlanner()]
    writers = [_saver(shared_dir / "a"), _saver(shared_dir / "b")]
    for number in range(6):
        by, planner = writers[number % 2], planners[(number // 2) % 2]
        _save(_state(number), by, planner)
    for path, number in ((shared_dir / "a", 4), (shared_dir / "b", 5)):
        assert_same(load(zeros(_state(number)), path), _state(number))


@ranks(4)
@pytest.mark.parametrize("kind", ["plain", "replicated"])
def test_what_all_ranks_hold_is_written_in_equal_parts(kind, shared_dir):
    state = {f"w{i}": filled((1000 + i, 700), torch.float32, i) for i in range(5)}
    state["odd"] = filled((333_333, 3), torch.bfloat16, 9)
    state["bias"] = filled((77,), torch.float32, 10)
    if kind == "replicated":
        mesh = init_device_mesh("cpu", (4,))
        state = {
            name: DTensor.from_local(tensor, mesh, [Replicate()]) for name, tensor in state.items()
        }
    else:
        state, _optimizer = _owned(state)
    planner, by = DataStatesSavePlanner(), _saver(shared_dir / "c")
    for _ in range(2):
        _save(state, by, planner)
    sizes = [None] * 4
    dist.all_gather_object(sizes, by.last_save.bytes_written)
    assert max(sizes) / min(sizes) < 1.02, sizes  # headers and checksums among them
    assert_same(load(zeros(state), shared_dir / "c"), state)
    loaded = _everything(shared_dir / "c")
    for name, tensor in state.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert bits(loaded[name]) == bits(local), name


@ranks(4)
def test_replicas_of_shards_are_split_and_load_at_any_sharding(shared_dir):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    dense = {f"w{i}": filled((512, 300), torch.float32, i) for i in range(8)}
    state = {
        name: distribute_tensor(tensor, mesh, [Replicate(), Shard(0)])
        for name, tensor in dense.items()
    }
    planner, by = DataStatesSavePlanner(), _saver(shared_dir / "c")
    for number in range(3):
        assert _save(state, by, planner) == (number > 0)
    sizes = [None] * 4
    dist.all_gather_object(sizes, by.last_save.bytes_written)
    assert max(sizes) / min(sizes) < 1.03, sizes
    loaded = _everything(shared_dir / "c")
    for name, tensor in dense.items():
        assert bits(loaded[name]) == bits(tensor), name
    flat = init_device_mesh("cpu", (4,))
    other = {
        name: distribute_tensor(torch.zeros_like(tensor), flat, [Shard(1)])
        for name, tensor in dense.items()
    }
    load(other, shared_dir / "c")
    for name, tensor in dense.items():
        assert bits(other[name].full_tensor()) == bits(tensor), name


@ranks(4)
@pytest.mark.parametrize("split", [True, False])
def test_with_stock_writers_and_readers_it_is_a_planner_like_any_other(split, shared_dir):
    group = own_group()
    replicated, _optimizer = _owned({"replicated": filled((2000, 300), torch.float32, 3)})
    state = {**_state(5), **replicated}
    planner = DataStatesSavePlanner(split_replicas=split)
    for _ in range(2):
        dcp.save(
            state,
            storage_writer=FileSystemWriter(shared_dir / "c"),
            planner=planner,
            process_group=group,
        )
    loaded = zeros(state)
    dcp.load(loaded, storage_reader=FileSystemReader(shared_dir / "c"), process_group=group)
    assert_same(loaded, state)


@ranks(2)
@_spied
def test_a_synchronous_save_exchanges_digests_too(shared_dir):
    group, planner = own_group(), _spy(DataStatesSavePlanner())
    for number in range(3):
        metadata = dcp.save(
            _state(number, count=50),
            storage_writer=_saver(shared_dir / "c"),
            planner=planner,
            process_group=group,
        )
        assert len(pickle.dumps(metadata)) < SMALL
        assert f"model.r{dist.get_rank()}.w0" in metadata.state_dict_metadata
    assert max(planner.offered[1:]) < SMALL
    assert_same(load(zeros(_state(2, count=50)), shared_dir / "c"), _state(2, count=50))


@ranks(2)
@pytest.mark.parametrize(
    ("where", "victim"),
    sampled(
        itertools.product(["create_local_plan", "create_global_plan", "finish_plan"], [0, 1]),
        keep=[("create_local_plan", 0), ("create_global_plan", 0), ("finish_plan", 1)],
    ),
)
@_spied
def test_after_a_failed_save_the_next_is_planned_anew_and_whole(where, victim, shared_dir):
    if where == "create_global_plan" and victim:
        pytest.skip("only the coordinator makes the global plan")
    planner, by = _spy(DataStatesSavePlanner()), _saver(shared_dir / "c")
    _save(_state(0), by, planner)

    def fail(plain, *args):
        if dist.get_rank() == victim:
            raise RuntimeError(f"refused in {where}")
        return plain(*args)

    with silence(5), own_step(where, fail), pytest.raises(DataStatesError, match="refused"):
        _save(_state(1), by, planner)
    dist.barrier()
    for number in (2, 3):
        _save(_state(number), by, planner)
        assert_same(load(zeros(_state(number)), shared_dir / "c"), _state(number))
    assert by.last_save.steady


@ranks(2)
def test_another_planner_object_on_one_rank_is_found_out_and_forgiven(shared_dir):
    by = _saver(shared_dir / "c")
    planner = DataStatesSavePlanner()
    _save(_state(0), by, planner)
    if dist.get_rank() == 0:
        planner = DataStatesSavePlanner()
    with pytest.raises(DataStatesError, match="different planner objects"):
        _save(_state(1), by, planner)
    dist.barrier()
    for number in (2, 3):
        _save(_state(number), by, planner)
    assert by.last_save.steady
    assert_same(load(zeros(_state(3)), shared_dir / "c"), _state(3))


@ranks(4)
def test_ranks_that_save_nothing_and_objects_that_grow(shared_dir):
    planner, by = DataStatesSavePlanner(), _saver(shared_dir / "c")
    for number in range(4):
        state = {"log": "x" * (10 ** (number + 1)), "n": number} if dist.get_rank() == 1 else {}
        _save(state, by, planner)
        loaded = {"log": "", "n": -1}
        load(loaded, shared_dir / "c")
        assert loaded == {"log": "x" * (10 ** (number + 1)), "n": number}


@ranks(2)
def test_what_the_coordinator_was_told_in_saves_that_failed_is_told_again(shared_dir):
    planner, by = DataStatesSavePlanner(), _saver(shared_dir / "c")

    def state(length):
        return {
            f"r{dist.get_rank()}": torch.ones(10),
            **({"log": "x" * length} if dist.get_rank() else {}),
        }

    _save(state(10), by, planner)
    for number in range(6):  # more than a coordinator remembers
        log = shared_dir / f"fired{number}"
        with (
            armed_on(0, "vote.before=error:EIO", log),
            pytest.raises(DataStatesError),
        ):
            _save(state(1000 * (number + 1)), by, planner)
    for length in (10, 10, 6000):
        _save(state(length), by, planner)
        assert_same(load(zeros(state(length)), shared_dir / "c"), state(length))


@ranks(2)
def test_optimizer_state_that_appears_and_a_parameter_that_is_frozen(shared_dir):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(200, 300)) for _ in range(4)]
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    planner, by = DataStatesSavePlanner(), _saver(shared_dir / "c")

    def state():
        return {
            "weights": {f"w{i}": weight for i, weight in enumerate(weights)},
            "optim": {
                f"w{i}": dict(optimizer.state[w])
                for i, w in enumerate(weights)
                if w in optimizer.state
            },
        }

    seen = []
    for step in range(6):
        if step == 3:
            weights[1].requires_grad_(False)
        if step:
            sum((weight**2).sum() for weight in weights).backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = {
            "weights": {name: w.detach().clone() for name, w in state()["weights"].items()},
            "optim": {
                name: {key: value.clone() for key, value in of.items()}
                for name, of in state()["optim"].items()
            },
        }
        seen.append(_save(state(), by, planner))
        assert_same(load(zeros(expected), shared_dir / "c"), expected)
    assert seen[0] is False
    assert seen[1] is False, "the optimizer's state appeared"
    assert seen[2] is True
    assert seen[5] is True


@ranks(4)
@_spied
def test_a_primed_planner_finds_its_first_save_planned(shared_dir):
    planner, by = _spy(DataStatesSavePlanner()), _saver(shared_dir / "c")
    dcp_datastates.prime(_state(0, count=100), planner=planner)
    assert planner.offered[0] > SMALL
    assert _save(_state(1, count=100), by, planner)
    assert planner.offered[1] < SMALL
    assert planner.answered[1] < SMALL
    assert_same(load(zeros(_state(1, count=100)), shared_dir / "c"), _state(1, count=100))


@ranks(2, timeout=60)
@pytest.mark.parametrize("what", ["state", "mapping", "planner", "class"])
def test_what_one_rank_cannot_prime_is_told_to_all(what, shared_dir):
    state, planner, by = _state(0), DataStatesSavePlanner(), _saver(shared_dir / "c")
    used = planner
    if dist.get_rank() == 1 and what == "state":
        state["lock"] = threading.Lock()
    elif dist.get_rank() == 1 and what == "mapping":
        state = 7
    elif dist.get_rank() == 1 and what == "planner":
        used = DefaultSavePlanner()
    elif dist.get_rank() == 1:
        used = _Skipping()
    told = {
        "state": "can be neither copied nor pickled",
        "planner": "remembers no plans",
        "class": "one class on all ranks",
    }
    with raises(Exception, told.get(what, "")):
        dcp_datastates.prime(state, planner=used)
    dist.barrier()
    dcp_datastates.prime(_state(0), planner=planner)
    assert _save(_state(1), by, planner)
    assert_same(load(zeros(_state(1)), shared_dir / "c"), _state(1))


@ranks(2, timeout=60)
def test_saves_in_flight_are_planned_before_another_is_primed(shared_dir):
    planner, by = DataStatesSavePlanner(), _saver(shared_dir / "c", read_deadline=3600)
    weights = torch.nn.Parameter(filled((70_000,), torch.float32, 1))
    torch.optim.SGD([weights], lr=1.0)
    for number in range(3):
        state = {**_state(number), "weights": weights}
        response = dcp_datastates.async_save(state, writer=by, planner=planner)
        dcp_datastates.prime(_state(0, count=number + 7), planner=planner)
        response.upload_completion.result(60)
    assert _save(_state(5, count=9), by, planner)
    assert_same(load(zeros(_state(5, count=9)), shared_dir / "c"), _state(5, count=9))


@ranks(1)
def test_a_planner_of_a_class_that_edits_plans_can_be_primed(shared_dir):
    planner, state = _Skipping(), {"w": torch.ones(4), "skip": torch.ones(3)}
    for _ in range(2):
        dcp_datastates.prime(state, planner=planner)
        assert [item.index.fqn for item in planner.plan.items] == ["w"]
        _saved_alone(state, planner, shared_dir / "c")
        metadata = DataStatesReader(shared_dir / "c").read_metadata()
        assert set(metadata.state_dict_metadata) == {"w"}


@ranks(2)
def test_the_planner_of_async_save_is_kept(shared_dir):
    by = _saver(shared_dir / "c")
    for number in range(3):
        assert _save(_state(number), by, None) == (number > 0)
    with _saver_closed(_saver(shared_dir / "d")) as other:
        assert _save(_state(5), other, None), "whatever writer"


@contextlib.contextmanager
def _saver_closed(by):
    yield by
    by.close()


@ranks(2)
def test_ranks_that_hold_different_tensors_under_one_name_are_told(shared_dir):
    planner, by = DataStatesSavePlanner(), _saver(shared_dir / "c")
    rows = 10 + dist.get_rank()
    with raises(DataStatesError, "'w'"):
        _save({"w": torch.zeros(rows, 4)}, by, planner)
    assert_same(_saved(by, planner, shared_dir), {"w": torch.ones(3, 4)})


def _saved(by, planner, shared_dir):
    dist.barrier()
    _save({"w": torch.ones(3, 4)}, by, planner)
    return load({"w": torch.zeros(3, 4)}, shared_dir / "c")


@ranks(2)
@pytest.mark.parametrize("stock", [0, 1])
def test_planners_of_two_classes_are_refused_and_told_why(stock, shared_dir):
    by = _saver(shared_dir / "c")
    planner = DefaultSavePlanner() if dist.get_rank() == stock else DataStatesSavePlanner()
    with raises(DataStatesError, "one class on all ranks"):
        _save(_state(0), by, planner)
    assert_same(_saved(by, None, shared_dir), {"w": torch.ones(3, 4)})


@ranks(2)
def test_a_save_by_one_rank_alone_leaves_what_the_ranks_agreed_on_as_it_was(shared_dir):
    planner, by = DataStatesSavePlanner(), _saver(shared_dir / "c")
    alone = _saver(shared_dir / f"alone{dist.get_rank()}")
    _save(_state(0), by, planner)
    for number in (1, 2, 3):
        other = _state(number, count=3)
        dcp.async_save(other, storage_writer=alone, planner=planner, no_dist=True).result(60)
        assert_same(load_everything_of(other, shared_dir / f"alone{dist.get_rank()}"), other)
        dist.barrier()
        _save(_state(number), by, planner)
        _save(_state(number, count=3), by, planner)
    assert_same(load(zeros(_state(3, count=3)), shared_dir / "c"), _state(3, count=3))


@ranks(2)
def test_a_save_that_could_not_be_read_again_leaves_the_one_before(shared_dir):
    mesh = init_device_mesh("cpu", (2,))
    size = 400_000_000
    mine = torch.empty(1 - dist.get_rank(), size, dtype=torch.uint8)
    whole = DTensor.from_local(mine, mesh, [Shard(0)], shape=(1, size), stride=(size, 1))
    if dist.get_rank() == 0:
        return  # the other one saves alone, and has no byte of the tensor
    planner, by = DataStatesSavePlanner(), _saver(shared_dir / "c")
    dcp.save({"n": 1}, storage_writer=by, planner=planner, no_dist=True)
    for _ in range(2):
        with raises(ConfigurationError, "'w' has 400000000", "must save together"):
            dcp.save({"w": whole, "n": 2}, storage_writer=by, planner=planner, no_dist=True)
        assert load_everything_of({"n": 1}, shared_dir / "c") == {"n": 1}


def load_everything_of(state, path):
    """What is at ``path``, which this rank has saved alone."""
    loaded = zeros(state)
    dcp.load(loaded, storage_reader=DataStatesReader(path), no_dist=True)
    return loaded


@ranks(2)
def test_a_state_that_is_not_flattened_is_what_it_was_at_the_call(shared_dir):
    planner = DataStatesSavePlanner(flatten_state_dict=False)
    by = _saver(shared_dir / "c")
    for number in range(4):
        state = {f"r{dist.get_rank()}": {"w": torch.full((50,), float(number)), "n": number}}
        response = dcp_datastates.async_save(state, writer=by, planner=planner)
        state[f"r{dist.get_rank()}"]["w"].zero_()
        response.upload_completion.result(60)
        found = load_everything(shared_dir / "c", DataStatesReader(shared_dir / "c"))
        mine = found[f"r{dist.get_rank()}"]
        assert torch.equal(mine["w"], torch.full((50,), float(number)))
        assert mine["n"] == number
        dist.barrier()


def _saved_alone(state, planner, path, **options):
    by = DataStatesWriter(path, host_cache_size=CACHE, read_window="immediate", **options)
    dcp_datastates.async_save(state, writer=by, planner=planner).upload_completion.result(60)
    return by.last_save.steady


@ranks(1)
@pytest.mark.parametrize("primed", [False, True])
def test_one_tensor_under_two_names_and_then_two(primed, shared_dir):
    planner = DataStatesSavePlanner()
    shared = filled((70_000,), torch.float32, 1)
    if primed:
        dcp_datastates.prime({"a": shared, "b": shared}, planner=planner)
    for number in range(4):
        two = {"a": filled((70_000,), torch.float32, 2), "b": filled((70_000,), torch.float32, 3)}
        state = two if number % 2 or primed else {"a": shared, "b": shared}
        _saved_alone(state, planner, shared_dir / "c", defer="all")
        assert_same(load(zeros(state), shared_dir / "c"), state)


@ranks(1)
def test_a_tensor_that_gets_other_memory_right_after_the_call(shared_dir):
    planner = DataStatesSavePlanner()
    for size in (1000, 500, 1000, 500):
        tensor = filled((size,), torch.float32, size)
        expected = {"x": tensor.clone()}
        by = DataStatesWriter(shared_dir / "c", host_cache_size=CACHE, read_window="immediate")
        response = dcp_datastates.async_save({"x": tensor}, writer=by, planner=planner)
        tensor.data = torch.zeros(1500 - size)
        response.upload_completion.result(60)
        assert_same(load(zeros(expected), shared_dir / "c"), expected)


@ranks(2)
def test_metadata_say_whether_a_dtensor_requires_grad_now(shared_dir):
    mesh = init_device_mesh("cpu", (2,))
    planner, by = DataStatesSavePlanner(), _saver(shared_dir / "c", defer="all")
    for number in range(4):
        dense = filled((400, 300), torch.float32, number)
        tensor = distribute_tensor(dense, mesh, [Shard(0)], src_data_rank=None)
        tensor = tensor.detach().requires_grad_(number % 2 == 0)
        assert _save({"w": tensor}, by, planner) == (number > 1)
        metadata = DataStatesReader(shared_dir / "c").read_metadata()
        assert metadata.state_dict_metadata["w"].properties.requires_grad == (number % 2 == 0)
        dist.barrier()


@ranks(1)
def test_values_that_memory_does_not_show(shared_dir):
    planner = DataStatesSavePlanner()
    for number in range(4):
        plain = torch.full((70_000,), complex(number, 2), dtype=torch.complex64)
        state = {"a": plain.conj() if number % 2 else plain}
        _saved_alone(state, planner, shared_dir / "c", defer="all")
        found = load({"a": torch.zeros(70_000, dtype=torch.complex64)}, shared_dir / "c")
        assert torch.equal(found["a"], state["a"].resolve_conj())


@ranks(1)
def test_numbers_of_any_length_and_numbers_that_are_equal(shared_dir):
    planner = DataStatesSavePlanner()
    for sign in (1, -1):
        state = {"long": sign * 10**5000, "one": 1, "true": True, "float": 1.0, "zero": sign * 0.0}
        _saved_alone(state, planner, shared_dir / "c")
        found = load_everything(shared_dir / "c")
        assert found == state
        assert {name: type(value) for name, value in found.items()} == {
            name: type(value) for name, value in state.items()
        }
        assert math.copysign(1.0, found["zero"]) == sign


class _Renaming(DataStatesSavePlanner):
    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        renamed = {f"new_{name}": value for name, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


@ranks(1)
def test_a_subclass_that_rewrites_the_state_has_its_way(shared_dir):
    planner = _Renaming()
    for number in range(3):
        _saved_alone({"a": torch.full((9,), float(number))}, planner, shared_dir / "c")
        found = load({"new_a": torch.zeros(9)}, shared_dir / "c")
        assert found["new_a"].eq(number).all()


class _Skipping(DataStatesSavePlanner):
    def create_local_plan(self):
        plan = super().create_local_plan()
        kept = [item for item in plan.items if not item.index.fqn.startswith("skip")]
        return dataclasses.replace(plan, items=kept)


class _Noting(DataStatesSavePlanner):
    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        assert {item.index.fqn for plan in plans for item in plan.items} == {"skip", "w"}
        noted = {**metadata.planner_data, "note": ("mine",)}
        return plans, dataclasses.replace(metadata, planner_data=noted)


def _save_by(how, state, planner, path):
    """A save, synchronous or not, that is over on all ranks."""
    if how == "save":
        dcp.save(state, storage_writer=_saver(path), planner=planner, process_group=own_group())
        dist.barrier()
    else:
        _save(state, _saver(path), planner)


@ranks(2)
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_subclass_that_edits_a_plan_has_its_way(how, shared_dir):
    skipping, noting = _Skipping(), _Noting()
    for number in range(3):
        state = {"w": torch.full((4,), float(number)), "skip": torch.ones(3)}
        _save_by(how, state, skipping, shared_dir / "skipping")
        _save_by(how, state, noting, shared_dir / "noting")
        metadata = DataStatesReader(shared_dir / "skipping").read_metadata()
        assert set(metadata.state_dict_metadata) == {"w"}
        metadata = DataStatesReader(shared_dir / "noting").read_metadata()
        assert metadata.planner_data == {"w": ("w",), "skip": ("skip",), "note": ("mine",)}
        for name in ("skipping", "noting"):
            found = load({"w": torch.zeros(4)}, shared_dir / name)
            assert found["w"].eq(number).all()
        dist.barrier()


@ranks(2)
@pytest.mark.parametrize("how", ["save", "async_save"])
@pytest.mark.parametrize("edits", [0, 1])
def test_a_subclass_that_edits_plans_on_one_rank_only_is_refused(edits, how, shared_dir):
    kind = _Skipping if dist.get_rank() == edits else DataStatesSavePlanner
    with raises(DataStatesError, "one class on all ranks"):
        _save_by(how, {"w": torch.ones(4)}, kind(), shared_dir / "c")
    dist.barrier()
    _save_by(how, {"w": torch.ones(4)}, None, shared_dir / "c")
    assert_same(load({"w": torch.zeros(4)}, shared_dir / "c"), {"w": torch.ones(4)})


class _Meddling(DataStatesWriter):
    def finish(self, metadata, results):
        metadata.planner_data = {"w": ("w",), "note": ("mine",)}
        super().finish(metadata, results)


@ranks(1)
def test_metadata_that_are_changed_before_they_are_written_are_refused(shared_dir):
    by = _Meddling(shared_dir / "c", host_cache_size=CACHE)
    with raises(ConfigurationError, "planner_data", "derived from DataStatesSavePlanner"):
        dcp.save({"w": torch.ones(4)}, storage_writer=by, planner=DataStatesSavePlanner())


def _doubling(planner, write_item, value):
    return DefaultSavePlanner.transform_object(
        planner, write_item, value * 2 if isinstance(value, torch.Tensor) else value
    )


@ranks(2)
@pytest.mark.parametrize("how", ["save", "async_save"])
@pytest.mark.parametrize("on", ["object", "class"])
def test_a_hook_that_is_set_later_is_not_passed_over_because_plans_are_remembered(
    on, how, shared_dir
):
    torch.manual_seed(0)
    planner, state = DataStatesSavePlanner(), {"w": torch.rand(300, 300)}
    owned = torch.nn.Parameter(state["w"])  # deferred: it could be read ahead
    optimizer = torch.optim.SGD([owned], lr=0.0)
    dcp_datastates.track(optimizer)
    stored = []
    for number in range(6):
        if on == "object" and number == 3:
            planner.transform_object = functools.partial(_doubling, planner)
        hooked = contextlib.nullcontext()
        if on == "class" and number >= 3:
            hooked = mock.patch.object(DataStatesSavePlanner, "transform_object", _doubling)
        with hooked:
            _save_by(how, {"w": owned.detach()}, planner, shared_dir / "c")
        stored.append(load(zeros(state), shared_dir / "c")["w"])
        dist.barrier()
    for number, found in enumerate(stored):
        assert_same(found, state["w"] * (1 if number < 3 else 2))


@ranks(1)
def test_a_hook_that_is_set_right_after_the_call_has_the_state_to_work_on(shared_dir):
    planner, state = DataStatesSavePlanner(), {"w": torch.rand(300, 300)}
    for _ in range(2):
        _saved_alone(state, planner, shared_dir / "c")
    go_on = threading.Event()

    def held(plain, planner, *args, **kwargs):
        assert go_on.wait(60)
        return plain(planner, *args, **kwargs)

    with own_step("set_up_planner", held):
        by = DataStatesWriter(shared_dir / "c", host_cache_size=CACHE)
        response = dcp_datastates.async_save(state, writer=by, planner=planner)
        planner.transform_object = functools.partial(_doubling, planner)
        go_on.set()
        response.upload_completion.result(60)
    assert_same(load(zeros(state), shared_dir / "c")["w"], state["w"] * 2)


@ranks(1)
def test_a_set_up_that_is_replaced_right_after_the_call_is_refused_and_saves_no_empty_state(
    shared_dir,
):
    planner, state = DataStatesSavePlanner(), {"w": torch.rand(300, 300)}
    for _ in range(2):
        _saved_alone(state, planner, shared_dir / "c")
    go_on, plain = threading.Event(), planner.set_up_planner
    by = DataStatesWriter(shared_dir / "c", host_cache_size=CACHE, read_window="immediate")
    first = torch.nn.Parameter(torch.rand(9))
    storage_meta = by.storage_meta

    def held():
        assert go_on.wait(60)
        return storage_meta()

    by.storage_meta = held
    response = dcp_datastates.async_save({"first": first}, writer=by, planner=planner)
    planner.set_up_planner = lambda state_dict, is_coordinator: plain(
        state_dict, None, is_coordinator
    )
    go_on.set()
    with raises(ConfigurationError, "set hooks before the call"):
        response.upload_completion.result(60)
    assert_same(load(zeros(state), shared_dir / "c"), state)


@ranks(2)
def test_options_that_are_changed_on_the_planner_are_not_passed_over(shared_dir):
    planner = DataStatesSavePlanner()
    state, _optimizer = _owned({"w": filled((4000, 300), torch.float32, 1)})
    by = _saver(shared_dir / "c")
    for _ in range(2):
        _save(state, by, planner)
    assert (
        len(DataStatesReader(shared_dir / "c").read_metadata().state_dict_metadata["w"].chunks) == 2
    )
    dist.barrier()
    planner.dedup_save_to_lowest_rank = True
    _save(state, by, planner)
    assert (
        len(DataStatesReader(shared_dir / "c").read_metadata().state_dict_metadata["w"].chunks) == 1
    )
    dist.barrier()
    assert (by.last_save.bytes_written > state["w"].nbytes) == (dist.get_rank() == 0)
    nested = {"a": {"w": torch.ones(3)}}
    _save(nested, by, planner)
    _save(nested, by, planner)
    planner.flatten_state_dict = False
    _save(nested, by, planner)
    assert set(DataStatesReader(shared_dir / "c").read_metadata().state_dict_metadata) == {"a"}


class _List(list):
    pass


@ranks(1)
def test_lists_of_a_class_of_their_own(shared_dir):
    planner = DataStatesSavePlanner()
    for number, value in enumerate(([1, 2], [torch.ones(5), 1], [3, 4], [torch.zeros(5), 2])):
        _saved_alone({"a": _List(value)}, planner, shared_dir / "c")
        names = set(DataStatesReader(shared_dir / "c").read_metadata().state_dict_metadata)
        assert names == ({"a.0", "a.1"} if number % 2 else {"a"})


@ranks(1)
def test_metadata_that_were_read_and_changed_stay_so_in_copies(shared_dir):
    by = DataStatesWriter(shared_dir / "c", host_cache_size=CACHE)
    found = dcp.save({"w": torch.ones(4)}, storage_writer=by, planner=DataStatesSavePlanner())
    assert found.version
    found.planner_data = {"changed": ("changed",)}
    for other in (copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert other.planner_data == found.planner_data
        assert other.state_dict_metadata == found.state_dict_metadata


@ranks(1)
def test_keys_that_are_equal_and_named_differently_are_told_apart(shared_dir):
    planner, by = DataStatesSavePlanner(), _saver(shared_dir / "c")
    for key in (1, True, 1, True):
        state = {"a": {key: torch.full((5,), float(key))}}
        dcp_datastates.async_save(state, writer=by, planner=planner).upload_completion.result(60)
        metadata = DataStatesReader(shared_dir / "c").read_metadata()
        assert set(metadata.state_dict_metadata) == {f"a.{key}"}


# --- reading ahead ------------------------------------------------------------------------------------


def _ahead(by):
    """The native job that reads the newest save of ``by`` before it is planned."""
    deadline = time.monotonic() + 20
    while (job := by._newest.reads._foreseen) is None:
        assert time.monotonic() < deadline, "nothing was read ahead"
        time.sleep(0.005)
    return job


@ranks(2)
def test_reads_begin_before_the_plan_is_agreed_on(shared_dir):
    planner, by = DataStatesSavePlanner(), _saver(shared_dir / "c")
    for number in range(2):
        _save(_state(number), by, planner)
    before = Residue.now()
    go_on = threading.Event()

    def held(plain, planner):
        assert go_on.wait(60)
        return plain(planner)

    with own_step("create_local_plan", held):
        first = dcp_datastates.async_save(_state(2), writer=by, planner=planner)
        job = _ahead(by)
        # The next one is not read ahead: it would take the cache, and this one may have to be read again.
        second = dcp_datastates.async_save(_state(3), writer=by, planner=planner)
        assert job.wait_read(-1, 20), "read, with planning still to come"
        time.sleep(0.5)
        assert by._newest.reads._foreseen is None
        assert not first.upload_completion.done()
        go_on.set()
        first.upload_completion.result(60)
        second.upload_completion.result(60)
    assert by.last_save.steady
    del job, first, second
    assert_same(load(zeros(_state(3)), shared_dir / "c"), _state(3))
    dist.barrier()
    assert_nothing_left(before)
    dist.barrier()


@ranks(2)
def test_what_was_read_ahead_by_a_plan_that_no_longer_holds_is_read_again(shared_dir):
    planner, by = DataStatesSavePlanner(), _saver(shared_dir / "c")
    mine = {f"r{dist.get_rank()}": filled((300, 300), torch.float32, 1)}
    common, _optimizer = _owned({"common": filled((4000, 300), torch.float32, 2)})
    first = {**mine, **common} if dist.get_rank() == 0 else mine
    for _ in range(3):
        _save(first, by, planner)
    assert by.last_save.steady
    # Now rank 1 holds it as well: nothing changes for rank 0 but what it is to write of it.
    both = {**mine, **common}
    steady = _save(both, by, planner)
    assert not steady or dist.get_rank() == 0
    assert_same(load(zeros(both), shared_dir / "c"), both)
    assert _save(both, by, planner)
    sizes = [None] * 2
    dist.all_gather_object(sizes, by.last_save.bytes_written)
    assert max(sizes) / min(sizes) < 1.02
    assert_same(load(zeros(both), shared_dir / "c"), both)


@ranks(2)
def test_a_save_that_fails_in_planning_lets_go_of_what_it_has_read_ahead(shared_dir):
    planner, by = DataStatesSavePlanner(), _saver(shared_dir / "c")
    for number in range(2):
        _save(_state(number), by, planner)
    before = Residue.now()

    def refuse(plain, planner):
        _ahead(by).wait_read(-1, 20)
        raise RuntimeError("refused")

    with (
        own_step("create_local_plan", refuse),
        pytest.raises(DataStatesError, match="refused"),
    ):
        _save(_state(2), by, planner)
    assert_nothing_left(before)
    dist.barrier()
    for number in (3, 4):
        _save(_state(number), by, planner)
    assert by.last_save.steady
    assert_same(load(zeros(_state(4)), shared_dir / "c"), _state(4))


@ranks(2)
def test_training_that_steps_at_once_waits_until_the_plan_is_agreed_on_and_is_not_torn(shared_dir):
    torch.manual_seed(dist.get_rank())
    weights = [torch.nn.Parameter(torch.randn(300, 400)) for _ in range(6)]
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    planner = DataStatesSavePlanner()
    by = DataStatesWriter(shared_dir / "c", host_cache_size=CACHE)

    def step():
        sum((weight**2).sum() for weight in weights).backward()
        optimizer.step()
        optimizer.zero_grad()

    def state():
        mine = f"r{dist.get_rank()}"
        return {
            "weights": {f"{mine}.w{i}": weight.detach() for i, weight in enumerate(weights)},
            "optim": {
                f"{mine}.w{i}": dict(optimizer.state[weight]) for i, weight in enumerate(weights)
            },
        }

    step()
    steady = 0
    for _ in range(12):
        expected = clone(state())
        response = dcp_datastates.async_save(state(), writer=by, planner=planner)
        step()
        response.upload_completion.result(60)
        steady += by.last_save.steady
        assert_same(load(zeros(expected), shared_dir / "c"), expected)
        dist.barrier()
    assert steady == 11


@ranks(2)
def test_fsdp_that_reshards_in_place_is_steady_and_each_save_is_the_state_at_its_call(shared_dir):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model = torch.nn.Sequential(*(torch.nn.Linear(301, 301) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    planner = DataStatesSavePlanner()
    by = DataStatesWriter(shared_dir / "c", host_cache_size=CACHE)

    def step():
        model(torch.randn(8, 301)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def state():
        return {
            "model": model.state_dict(),
            "optim": get_optimizer_state_dict(model, optimizer),
        }

    step()
    steady = []
    for _ in range(5):
        current = state()
        expected = clone(current)
        response = dcp_datastates.async_save(current, writer=by, planner=planner)
        step()
        response.upload_completion.result(60)
        steady.append(by.last_save.steady)
        assert_same(load(zeros(expected), shared_dir / "c"), expected)
        dist.barrier()
    assert steady == [False, True, True, True, True]
