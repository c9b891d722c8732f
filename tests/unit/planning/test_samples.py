"""Samples of replicas: the same on ranks that hold the same, and a difference is named."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.state.chunks import Box, item

from dcp_datastates.errors import ReplicasDifferError
from dcp_datastates.planning.balance import assign
from dcp_datastates.planning.messages import LocalPlan
from dcp_datastates.planning.samples import Held, Samples, sample, word_of

SHAPE = (1024, 300)


def _plans(names_by_rank):
    whole = Box((0, 0), SHAPE)
    locals_ = [
        LocalPlan.of([item(name, SHAPE, whole) for name in names], None) for names in names_by_rank
    ]
    return locals_, assign(locals_)[0]


def _said(local, share, values, seed=7, unknown=()):
    """What a rank says that holds ``values`` by name; the host cannot read the ``unknown`` ones."""
    names = [local.head.names[item] for item in share.shared]
    tensors = [values[name] for name in names]
    addresses = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
    sizes = np.array(
        [
            0 if name in unknown else tensor.nbytes
            for name, tensor in zip(names, tensors, strict=True)
        ],
        np.int64,
    )
    return sample(share, Held(addresses, sizes), seed)


def _values(names):
    return {name: torch.full(SHAPE, float(number)) for number, name in enumerate(names)}


@pytest.mark.parametrize("count", [1, 5, 32, 33, 400])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_tensor_that_differs_is_named_or_its_neighbours_are(count, place):
    names = [f"w{number}" for number in range(count)]
    locals_, shares = _plans([names, names])
    values, others = _values(names), _values(names)
    which = {"first": 0, "middle": count // 2, "last": count - 1}[place]
    name = locals_[1].head.names[int(shares[1].shared[which])]
    others[name] = others[name] + 1
    said = [_said(locals_[0], shares[0], values), _said(locals_[1], shares[1], others)]
    assert len(said[0]) <= 128, "bytes that travel with every save"
    Samples(locals_, shares).check([said[0], said[0]])
    with pytest.raises(ReplicasDifferError, match="rank 0 and rank 1") as caught:
        Samples(locals_, shares).check(said)
    if count <= 32:
        assert f"values of {name!r}." in str(caught.value)


def test_places_change_from_save_to_save():
    locals_, shares = _plans([["w"], ["w"]])
    values = {"w": torch.arange(1024.0 * 300).reshape(SHAPE)}
    assert len({_said(locals_[0], shares[0], values, seed) for seed in range(20)}) == 20
    assert _said(locals_[0], shares[0], values, (1 << 64) - 1)


def test_each_set_of_holders_is_compared_by_itself():
    names = [["a", "b"], ["b", "a"], ["b", "c"], ["c", "own"]]
    locals_, shares = _plans(names)
    values = _values(["a", "b", "c", "own"])
    said = [_said(*pair, values) for pair in zip(locals_, shares, strict=True)]
    samples = Samples(locals_, shares)
    samples.check(said)
    others = {**values, "c": values["c"] + 1, "own": values["own"] + 1}
    with pytest.raises(ReplicasDifferError, match="rank 2 and rank 3 hold different values of 'c'"):
        samples.check([*said[:3], _said(locals_[3], shares[3], others)])


def test_what_the_host_cannot_read_is_not_compared_and_the_rest_is():
    names = ["a", "b"]
    locals_, shares = _plans([names] * 4)
    values = _values(names)
    others = {**values, "b": values["b"] + 1}
    samples = Samples(locals_, shares)

    def said(values, *unknown):
        return _said(locals_[0], shares[0], values, unknown=unknown)

    samples.check([said(values), said(others, "b"), said(values), b""])
    samples.check([said(values, "a", "b"), said(others, "b"), said(values, "a"), said(values)])
    with pytest.raises(ReplicasDifferError, match="rank 2 and rank 3 hold different values of 'b'"):
        samples.check([said(values, "a", "b"), said(values, "b"), said(values), said(others)])
    with pytest.raises(ReplicasDifferError, match="'b'"):
        samples.check([said(values, "b"), said(values, "a"), said(others), said(values)])


@pytest.mark.parametrize("opaque", [torch.relu, int, lambda: 0], ids=["builtin", "class", "lambda"])
@pytest.mark.parametrize("kind", ["tuple", "dict", "object"])
def test_what_cannot_be_looked_into_hides_no_difference_behind_it(opaque, kind):
    def held(number):
        values = {"opaque": opaque, "number": number}
        return {
            "tuple": tuple(values.values()),
            "dict": values,
            "object": SimpleNamespace(**values),
        }

    assert word_of(held(1)[kind]) != word_of(held(2)[kind])
