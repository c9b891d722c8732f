"""Who writes what: each chunk by one rank that holds it, in equal parts, whatever the ranks are called."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.state.chunks import Box, boxes
from support.state.plans import item, plan, replica, thing, with_hints
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from unit.planning.balance import divided, key_of

from dcp_datastates.format import ragged
from dcp_datastates.format.metadata_check import validate
from dcp_datastates.format.metadata_objects import Entries
from dcp_datastates.planning.balance import RankPlan, assign
from dcp_datastates.planning.column_planning import PlanOptions, assign_shares
from dcp_datastates.planning.messages import Why

quick = settings(max_examples=150)
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.complex128]


def stock(plans):
    """What stock DCP makes of the plans, which it has deduplicated."""
    deduped = dedup_save_plans([SavePlan(p.write_items()) for p in plans])
    return create_default_global_save_plan(deduped)


def nbytes(write_item):
    data = write_item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data else 0


def bytes_of(plans, finals):
    return [
        sum(map(nbytes, final.write_items(local)))
        for local, final in zip(plans, finals, strict=True)
    ]


def written(plans, finals):
    """All that is written, by rank."""
    return [final.write_items(local) for local, final in zip(plans, finals, strict=True)]


def assert_partition(plans, finals):
    """Every element of each chunk is written by exactly one rank, which has it."""
    held, found = {}, Counter()
    for local, final in zip(plans, finals, strict=True):
        for write_item in local.write_items():
            data = write_item.tensor_data
            held.setdefault(write_item.index.fqn, {})
            if data:
                held[write_item.index.fqn][data.chunk.offsets, data.chunk.sizes] = data
        mine = {(i.index.fqn, i.index.offset) for i in local.write_items()}
        assert (np.diff(final.items) > 0).all()
        for write_item in final.write_items(local):
            data = write_item.tensor_data
            if not data:
                found[write_item.index.fqn] += 1
                continue
            assert write_item.index.offset == data.chunk.offsets
            found[write_item.index.fqn] += math.prod(data.chunk.sizes)
            if write_item.type is WriteItemType.TENSOR:
                assert (write_item.index.fqn, data.chunk.offsets) in mine
    for name, chunks in held.items():
        assert found[name] == (sum(math.prod(sizes) for _, sizes in chunks) if chunks else 1)
    return found


@st.composite
def unreplicated(draw):
    """Plans that have tensors in boxes, whole tensors and objects; each once."""
    ranks = [[] for _ in range(draw(st.integers(1, 5)))]
    for number in range(draw(st.integers(0, 6))):
        name = f"t{number}"
        kind = draw(st.integers(0, 3))
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        if kind == 0:
            draw(st.sampled_from(ranks)).append(thing(name))
        elif kind == 1:
            draw(st.sampled_from(ranks)).append(item(name, shape, dtype=dtype))
        else:
            cuts = [draw(st.lists(st.integers(0, max(size, 1)), max_size=3)) for size in shape]
            for box in boxes(shape, cuts):
                draw(st.sampled_from(ranks)).append(item(name, shape, box, dtype))
    return [
        plan(*draw(st.permutations(items)), mappings={i.index.fqn: (i.index.fqn,) for i in items})
        for items in ranks
    ]


@quick
@given(unreplicated(), st.booleans(), st.booleans())
def test_without_replicas_it_is_what_stock_makes(plans, split, lowest):
    global_plan, metadata = stock(plans)
    finals, catalog = assign(plans, split=split, dedup_to_lowest_rank=lowest)
    for local, final, expected in zip(plans, finals, global_plan, strict=True):
        assert with_hints(final.write_items(local)) == with_hints(expected.items)
        assert (np.arange(len(local.head.names)) == final.items).all()
        again = RankPlan.decode(final.encode())
        assert again.digest == final.digest
        assert with_hints(again.write_items(local)) == with_hints(expected.items)
    made = dict(Entries(catalog))
    assert made == metadata.state_dict_metadata
    assert list(made) == list(metadata.state_dict_metadata)
    assert catalog.mappings == {key: path for p in plans for key, path in p.head.mappings.items()}


@st.composite
def replicated(draw):
    """Plans of a mesh: tensors are sharded over some ranks and replicated over others, or whole on some."""
    count = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    ranks = [[] for _ in range(count)]
    for number in range(draw(st.integers(0, 8))):
        name = f"t{number}"
        shards = draw(st.sampled_from([n for n in (1, 2, 3, 4) if count % n == 0]))
        rows = draw(st.sampled_from([0, 1, 5, 64, 1000]))
        width = draw(st.sampled_from([1, 1000, 8192]))
        dtype = draw(st.sampled_from(DTYPES))
        kind = draw(st.integers(0, 4))
        holders = draw(st.sets(st.integers(0, count - 1), min_size=1))
        for rank in range(count):
            if kind == 0:
                ranks[rank].append(thing(name))
            elif kind == 1:
                if rank in holders:
                    ranks[rank].append(item(name, (rows, width), dtype=dtype))
            elif kind == 4:
                if rank in holders:
                    ranks[rank].append(item(name, (rows, width), Box((0, 0), (rows, width)), dtype))
            else:
                shard = rank % shards if kind == 2 else rank // (count // shards)
                box = Box((rows * shard, 0), (rows, width))
                ranks[rank].append(item(name, (rows * shards, width), box, dtype))
    return ranks


@quick
@given(replicated(), st.booleans(), st.booleans())
def test_replicas_are_written_once(ranks, split, lowest):
    plans = [plan(*items) for items in ranks]
    finals, catalog = assign(plans, split=split, dedup_to_lowest_rank=lowest)
    assert_partition(plans, finals)
    # As stock numbers chunks: in the order of ranks and items, which is what the metadata lists.
    made = dict(Entries(catalog))
    shards = [
        [dataclasses.replace(i, type=WriteItemType.SHARD) if i.tensor_data else i for i in items]
        for items in written(plans, finals)
    ]
    _, expected = create_default_global_save_plan([SavePlan(items) for items in shards])
    assert made == expected.state_dict_metadata
    assert validate(catalog, filled=False) == []
    for items in written(plans, finals):
        for write_item in items:
            if write_item.tensor_data:
                stored = made[write_item.index.fqn]
                assert stored.chunks[write_item.index.index] == write_item.tensor_data.chunk
    if not split or lowest:
        assert all((final.begins == 0).all() for final in finals)
    if lowest:
        for number, (local, final) in enumerate(zip(plans, finals, strict=True)):
            for write_item in final.write_items(local):
                assert not any(write_item in earlier.write_items() for earlier in plans[:number])


@st.composite
def uneven(draw):
    """Plans of ranks that have much or little to write of their own, and some large replicas."""
    count = draw(st.integers(2, 8))
    own = [item(f"own{rank}", (draw(st.integers(1, 1 << 19)),)) for rank in range(count)]
    common = []
    for number in range(draw(st.integers(1, 3))):
        width = draw(st.sampled_from([1 << 6, 1000, 1 << 12, 17_000, 1 << 17]))
        rows = draw(st.integers(1 << 18, 1 << 20)) // width + 1
        common.append(replica(f"t{number}", (rows, width)))
    return [[each, *common] for each in own]


@quick
@given(replicated() | uneven())
def test_each_rank_writes_what_the_reference_gives_it(ranks):
    held = [[key_of(each) for each in items] for items in ranks]
    found, slices = [], {key: [] for keys in held for key in keys}
    for keys, final in zip(held, assign([plan(*items) for items in ranks])[0], strict=True):
        columns = zip(final.items.tolist(), final.begins.tolist(), final.ends.tolist(), strict=True)
        found.append({(keys[at], begin, end) for at, begin, end in columns})
        for key, begin, end in found[-1]:
            slices[key].append((begin, end))
    assert found == divided(ranks)
    for (_, _, sizes), parts in slices.items():
        begins, ends = zip(*sorted(parts), strict=True)
        assert (*begins, sizes[0] if sizes else 1) == (0, *ends), "every row is written, and once"


@quick
@given(replicated(), st.randoms(use_true_random=False))
def test_the_order_of_items_does_not_change_what_is_dealt(ranks, random):
    plans = [plan(*items) for items in ranks]
    loads = bytes_of(plans, assign(plans)[0])
    assert loads == bytes_of(plans, assign(plans)[0])
    shuffled = [plan(*random.sample(items, len(items))) for items in ranks]
    assert bytes_of(shuffled, assign(shuffled)[0]) == loads


@pytest.mark.parametrize("holders", [2, 3, 8, 64, 1000])
def test_data_parallel_ranks_write_the_same_number_of_bytes(holders):
    """A model of 8 GiB in 101 tensors, with their optimizer's steps and some objects."""
    items = []
    for layer in range(101):
        items += [
            replica(f"{layer}.w", (20_011, 1024)),
            item(f"{layer}.b", (1024,)),
            item(f"{layer}.s", ()),
        ]
    local = plan(*items, thing("epoch"))
    plans = [local] * holders
    finals, catalog = assign(plans)
    loads = bytes_of(plans, finals)
    assert all(abs(load * holders / sum(loads) - 1) < 0.01 for load in loads)
    assert catalog.counts.sum() <= 303 + holders - 1
    parts = [part for items in written(plans, finals) for part in items]
    slices = [nbytes(part) for part in parts if part.type is WriteItemType.SHARD]
    assert min(slices) >= 64 << 10


def test_all_that_hold_a_replica_know_of_which_they_write_parts_and_which_are_not_declared_equal():
    large, small = replica("l", (8192, 64)), replica("s", (3, 3))
    more = [replica(f"m{n}", (8192 + n, 64)) for n in range(3)]
    plans = [
        plan(large, small, *more, thing("o")),
        plan(thing("o"), *reversed(more), large, small),
        plan(small, large, item("own", (8192, 64))),
        plan(thing("o")),
    ]
    for is_split in (True, False):
        finals, _ = assign(plans, split=is_split)
        names = [
            [(int(n), local.head.names[at]) for n, at in zip(final.sets, final.shared, strict=True)]
            for local, final in zip(plans, finals, strict=True)
        ]
        assert names[0] == names[1]
        by_kind = [
            {name for number, name in names[0] if number % len(Why) == kind}
            for kind in (Why.UNDECLARED, Why.CUT, Why.WHOLE)
        ]
        cut = {"l", "m0", "m1", "m2"} if is_split else set()
        assert by_kind == [{"o"}, cut, {"l", "m0", "m1", "m2", "s"} - cut]
        assert names[2] == [pair for pair in names[0] if pair[1] in "ls"]
        assert names[3] == [pair for pair in names[0] if pair[1] == "o"]
        assert [number for number, _ in names[0]] == sorted(number for number, _ in names[0])
        sampled, _ = finals[0].sampled
        assert {plans[0].head.names[at] for at in sampled} == cut | {"o"}
        decoded = RankPlan.decode(finals[1].encode())
        assert decoded.shared.tolist() == finals[1].shared.tolist()
        assert decoded.sets.tolist() == finals[1].sets.tolist()


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("kind", ["item", "thing"])
def test_what_is_not_declared_equal_is_the_lowest_holders(kind, split):
    """One rank's state is stored, as of DDP's buffers the first rank's, and no mixture."""
    values = [thing(f"v{n}") if kind == "thing" else item(f"v{n}", (3, n)) for n in range(64)]
    plans = [plan(replica("r", (9, 9))), plan(*values), plan(*reversed(values)), plan(*values[:9])]
    finals, _ = assign(plans, split=split)
    assert [len(final.items) for final in finals] == [1, 64, 0, 0]


def test_a_name_that_is_a_value_on_one_rank_and_a_dict_on_another_is_refused():
    plans = [
        plan(thing("a"), mappings={"a": ("a",)}),
        plan(thing("a.b"), mappings={"a.b": ("a", "b")}),
    ]
    with pytest.raises(ValueError, match="do not agree on 'a'"):
        assign_shares(plans, PlanOptions())


def test_no_rank_is_preferred_for_a_lone_small_tensor():
    writers = Counter()
    for number in range(200):
        finals, _ = assign([plan(replica(f"t{number}", (3,)))] * 4)
        writers[next(rank for rank in range(4) if len(finals[rank].items))] += 1
    assert len(writers) == 4
    assert min(writers.values()) > 20


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (item("x", (2, 3)), item("x", (3, 2)), ["[2, 3]", "[3, 2]"]),
        (item("x", (2, 3)), item("x", (2, 3, 1)), ["[2, 3]", "[2, 3, 1]"]),
        (item("x", (2,)), item("x", (2,), dtype=torch.float64), ["float32", "float64"]),
        (item("x", (2,)), thing("x"), ["an object", "a tensor of shape [2]"]),
        (item("x", ()), thing("x"), ["an object", "a tensor of shape []"]),
    ],
)
@pytest.mark.parametrize("swap", [False, True])
def test_contradictions_name_the_fqn_and_the_ranks(one, other, words, swap):
    if swap:
        one, other = other, one
    with pytest.raises(ValueError) as refused:
        assign([plan(item("y", (1,))), plan(one), plan(item("y", (1,)), one), plan(other)])
    for word in ["'x'", "rank 1", "rank 3", *words]:
        assert word in str(refused.value)


def test_of_other_properties_the_first_rank_has_its_way():
    plans = [plan(item("x", (2,), requires_grad=True)), plan(item("x", (2,)))]
    _, catalog = assign(plans)
    assert catalog.table[catalog.properties[0]].requires_grad


def test_a_rank_that_has_a_chunk_twice_is_refused():
    shard = item("x", (4,), Box((0,), (2,)))
    with pytest.raises(ValueError, match="'x': rank 1"):
        assign([plan(), plan(shard, shard)])
    empty = item("x", (4,), Box((4,), (0,)))
    finals, _ = assign([plan(shard), plan(empty, empty)])
    assert len(finals[1].items) == 1


@quick
@given(replicated())
def test_colliding_hashes_change_nothing(ranks):
    plans = [plan(*items) for items in ranks]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "dcp_datastates.planning.replicas.fingerprints",
            lambda keys, *_, **__: np.zeros(len(keys), dtype=np.uint64),
        )
        patch.setattr(
            "dcp_datastates.planning.balance.fingerprints",
            lambda keys, *_, **__: np.zeros(len(keys), dtype=np.uint64),
        )
        original = ragged.fingerprints
        patch.setattr(
            ragged, "fingerprints", lambda *columns, salt: original(*columns, salt=salt) % 2
        )
        finals, _ = assign(plans)
    assert_partition(plans, finals)


def test_mappings_are_merged_and_the_lowest_rank_wins():
    one = plan(thing("a"), mappings={"a": ("a",), "b": ("b",)})
    other = plan(thing("c"), mappings={"a": ("other",), "c": ("c",)})
    _, catalog = assign([one, plan(), other])
    assert catalog.mappings == {"a": ("a",), "b": ("b",), "c": ("c",)}
    assert assign([plan(), plan()])[1].mappings is None
