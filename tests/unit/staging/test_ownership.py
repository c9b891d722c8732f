"""Which tensors are deferred: those whose every change a hook announces."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from support.state.wrapped import Blocks, blocks

import dcp_datastates
from dcp_datastates.staging.ownership import Ownership, never_defer, track


def owned_by(*optimizers):
    """Groups of the parameters of the first."""
    parameters = optimizers[0].param_groups[0]["params"]
    return groups(Ownership(optimizers), *(parameter.detach() for parameter in parameters))


def groups(ownership, *tensors):
    return ownership.groups([tensor.untyped_storage() for tensor in tensors])


def optimizer(*parameters, capturable=False):
    return torch.optim.AdamW(list(parameters), lr=0.1, capturable=capturable)


def step(stepping, monkeypatch):
    """As on an accelerator, where ``capturable`` is allowed."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for parameter in stepping.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    stepping.step()


@pytest.fixture
def parameter():
    return torch.nn.Parameter(torch.zeros(8))


def test_what_a_graph_may_step_is_not_deferred(parameter):
    """It may have been captured before the first look."""
    capturable = optimizer(parameter, capturable=True)
    track(capturable)
    assert owned_by(capturable) == [None]


def test_what_steps_by_itself_is_deferred(parameter, monkeypatch):
    """torch.compile makes optimizers capturable, and calls the hooks at each step."""
    compiled = optimizer(parameter, capturable=True)
    step(compiled, monkeypatch)
    assert owned_by(compiled) != [None]
    never_defer(compiled)
    assert owned_by(compiled) == [None]


@pytest.mark.parametrize("first", [False, True])
def test_what_a_graph_may_step_as_well_is_not_deferred(parameter, first):
    plain, capturable = optimizer(parameter), optimizer(parameter, capturable=True)
    optimizers = [capturable, plain] if first else [plain, capturable]
    assert owned_by(*optimizers) == [None]


def test_what_several_own_is_in_a_group_of_its_own(parameter):
    own = torch.nn.Parameter(torch.zeros(8))
    first, second = optimizer(parameter, own), optimizer(parameter)
    shared, alone = owned_by(first, second)
    assert shared != alone
    assert None not in (shared, alone)


def test_the_tensors_within_an_owned_wrapper_are_deferred(parameter):
    moment, other = blocks(seed=1), blocks(seed=1)
    owner = optimizer(parameter)
    owner.state[parameter]["moment"] = Blocks(moment, torch.zeros(4))
    found = groups(Ownership([owner]), moment.codes, moment.scales, other.codes, parameter)
    assert found[:2] == [found[3]] * 2
    assert found[2] is None


def test_what_is_tracked_beside_an_optimizer_is_deferred_with_its_tensors(parameter):
    """Its parameters in low precision, say, into which mixed precision copies them after the step."""
    flat, other = torch.zeros(8), torch.zeros(8)
    owner = optimizer(parameter)
    track(owner, also=[flat])
    assert groups(Ownership([owner]), flat[4:], other) == [*owned_by(owner), None]
    track(owner)  # in place of the earlier call
    assert groups(Ownership([owner]), flat) == [None]


@pytest.mark.parametrize("cycle", [False, True])
def test_what_is_tracked_beside_an_optimizer_lives_no_longer_than_it(parameter, cycle):
    flat = torch.zeros(8)
    owner = optimizer(parameter)
    track(owner, also=[flat])
    if cycle:
        flat.owner = owner
    gone = weakref.ref(flat)
    del flat
    gc.collect()
    assert gone() is not None
    del owner
    gc.collect()
    assert gone() is None


def test_what_is_tracked_beside_an_optimizer_is_not_pickled_or_copied(parameter):
    owner = optimizer(parameter)
    before, copied = pickle.dumps(owner), vars(copy.deepcopy(owner)).keys()
    track(owner, also=[torch.zeros(100_000)])
    assert pickle.dumps(owner) == before
    assert vars(copy.deepcopy(owner)).keys() == copied


def test_an_optimizer_that_exchanges_its_parameters_outside_of_steps_is_copied(tmp_path):
    """Schedule-free optimizers do, in ``train()`` and ``eval()``."""

    class ScheduleFree(torch.optim.SGD):
        def eval(self):
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.neg_()

        train = eval  # noqa: A003

    weights = torch.nn.Parameter(torch.ones(100_000))
    optimizer = ScheduleFree([weights], lr=0.1)
    dcp_datastates.track(optimizer)
    handle = dcp_datastates.async_save({"w": weights}, tmp_path / "1", reads=600.0)
    optimizer.eval()
    handle.result()
    assert dcp_datastates.load(tmp_path / "1")["w"].eq(1).all()
