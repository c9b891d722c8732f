"""Optimizers of every kind, saved and restored by the manager into a program that has changed.

The oracle is a deep copy of the live objects: after the restore, each parameter has the state and the settings that it
had, with their types, and training goes on as it would have.
"""

import copy
import functools
import itertools
import logging

import pytest
import torch
from support.state.checkpoints import assert_same, raises
from support.state.loops import manager
from support.state.wrapped import blocks
from support.tiers import sampled
from torch import nn

from dcp_datastates import latest, load
from dcp_datastates.errors import ConfigurationError, IncompatibleStateError

same = functools.partial(assert_same, types=True)


class _Odd(torch.optim.Optimizer):
    """Keeps what optimizers of users keep: matrices by dimension, histories, strings, and a count of its own."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        self.state.setdefault("global", {"count": 0, "sum": torch.zeros(2)})["count"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["mode"] = "warm" if state["step"] < 3 else "hot"
                state["none"], state["empty"] = None, [{}, (), []]
                matrices = state.setdefault("matrices", {})
                for n in range(parameter.dim()):
                    rows = parameter.grad.movedim(n, 0).reshape(parameter.shape[n], -1)
                    matrices[n] = matrices.get(n, 0) + rows @ rows.T
                state.setdefault("history", []).append((state["step"], parameter.grad.norm()))
                parameter -= float(group["lr"]) * parameter.grad * state["matrices"][0].mean()


def _made(kind, **options):
    return lambda groups: kind(groups, **{"lr": 0.05, **options})


OPTIMIZERS = {
    "SGD": _made(torch.optim.SGD),
    "momentum": _made(torch.optim.SGD, momentum=0.9),
    "AdamW": _made(torch.optim.AdamW),
    "amsgrad": _made(torch.optim.AdamW, amsgrad=True, foreach=True),
    "fused": _made(torch.optim.AdamW, fused=True),
    "tensor lr": _made(torch.optim.AdamW, lr=torch.tensor(0.05)),
    "Adagrad": _made(torch.optim.Adagrad),
    "Adafactor": _made(torch.optim.Adafactor),
    "RMSprop": _made(torch.optim.RMSprop, momentum=0.9, centered=True),
    "NAdam": _made(torch.optim.NAdam),
    "odd": _Odd,
}


class _Net(nn.Module):
    def __init__(self, names=("a", "b", "c")):
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x):
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x


def _grouped(model, optimizer, cuts):
    parameters = list(model.parameters())
    edges = [0, *cuts, len(parameters)]
    return optimizer([{"params": parameters[a:b]} for a, b in itertools.pairwise(edges)])


def _same_program(model, make, cuts=(2,)):
    return {"model": model, "optimizer": _grouped(model, make, cuts)}


def _frozen(model, make):
    for parameter in model.a.parameters():
        parameter.requires_grad_(False)
    return _same_program(model, make)


def _reordered(model, make):
    first, second, third = ([*each.parameters()] for each in (model.a, model.b, model.c))
    return {"model": model, "optimizer": make([{"params": [*third, *second]}, {"params": first}])}


def _in_parts(model, make):
    parts = [_Net(("a", "c")), _Net(("b",))]
    optimizer = make([{"params": [*parts[1].parameters()]}, {"params": [*parts[0].parameters()]}])
    return {"model": parts, "optimizer": optimizer}


def _warmed(model, make):
    state = _same_program(model, make)
    _train(state, 1, seed=5)
    return state


CHANGES = {
    "same": _same_program,
    "frozen": _frozen,
    "reordered": _reordered,
    "split groups": functools.partial(_same_program, cuts=[1, 2, 5]),
    "in parts": _in_parts,
    "has a state": _warmed,
    "compiled": lambda model, make: (
        _same_program(model, make) | {"model": torch.compile(model, backend="eager")}
    ),
}


def _train(state, steps, seed=0):
    draws = torch.Generator().manual_seed(seed)
    model = state["model"]
    for _ in range(steps):
        model(torch.randn(3, 4, generator=draws)).square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def _by_name(state):
    """A deep copy of each parameter's state and settings, by the parameter's name."""
    models = state["model"] if isinstance(state["model"], list) else [state["model"]]
    names = {
        parameter: name.replace("_orig_mod.", "")
        for model in models
        for name, parameter in model.named_parameters()
    }
    found = {"global": copy.deepcopy(state["optimizer"].state.get("global"))}
    for group in state["optimizer"].param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            own = state["optimizer"].state.get(parameter, {})
            found[names[parameter]] = copy.deepcopy((dict(own), settings, parameter.detach()))
    return found


def _save(tmp_path, state):
    with manager(tmp_path) as checkpoints:
        checkpoints.save(1, state)


def _saved(tmp_path, make, **options):
    torch.manual_seed(0)
    state = _same_program(_Net(), make)
    for number, group in enumerate(state["optimizer"].param_groups):
        group["weight_decay"] = 0.0  # the same, so that groups may be cut anew
        group["initial_lr"] = 0.7
        if number and options.get("differ"):
            group["lr"] = 0.3
    _train(state, 3)
    _save(tmp_path, state)
    return state


def _restored(tmp_path, state, **options):
    with manager(tmp_path) as checkpoints:
        assert checkpoints.restore_latest(state, **options) == 1
    return state


@pytest.mark.parametrize(
    ("kind", "change"),
    sampled(
        itertools.product(OPTIMIZERS, CHANGES),
        keep=lambda pair: pair[0] in ("AdamW", "odd") or pair[1] == "same",
    ),
)
def test_each_parameter_gets_its_state_and_settings_back(kind, change, tmp_path):
    first = _saved(tmp_path, OPTIMIZERS[kind])
    expected = _by_name(first)
    torch.manual_seed(1)
    second = _restored(tmp_path, CHANGES[change](_Net(), OPTIMIZERS[kind]))
    same(_by_name(second), expected)
    if change in ("same", "split groups", "has a state"):
        _train(first, 2, seed=9)
        _train(second, 2, seed=9)
        same(_by_name(second), _by_name(first))


@pytest.mark.parametrize("kind", sampled(OPTIMIZERS, keep=lambda kind: kind in ("AdamW", "odd")))
@pytest.mark.parametrize("itself", [False, True])
def test_a_rename_of_a_model_renames_the_parameters_of_its_optimizer(kind, itself, tmp_path):
    expected = _by_name(_saved(tmp_path, OPTIMIZERS[kind]))
    new = {"a": "b", "b": "a", "c": "last"}  # two change their places
    rename = {f"model.{old}.": f"model.{name}." for old, name in new.items()}
    if itself:
        rename |= {
            f"optimizer.state.{old}.": f"optimizer.state.{name}." for old, name in new.items()
        }
    second = _same_program(_Net(("a", "b", "last")), OPTIMIZERS[kind])
    _restored(tmp_path, second, rename=rename)
    renamed = {
        ".".join([new.get(name.split(".")[0], name), *name.split(".")[1:]]): each
        for name, each in expected.items()
    }
    same(_by_name(second), renamed)


@pytest.mark.parametrize(
    "kind", sampled(OPTIMIZERS, keep=lambda kind: kind in ("SGD", "AdamW", "odd"))
)
def test_moments_of_a_parameter_that_the_optimizer_lacks_are_refused_by_name(kind, tmp_path):
    expected = _by_name(_saved(tmp_path, OPTIMIZERS[kind]))
    model = _Net()
    fewer = [*model.b.parameters(), *model.c.parameters()]
    second = {"model": model, "optimizer": OPTIMIZERS[kind](fewer)}
    if expected["a.weight"][0]:
        before = copy.deepcopy(model.state_dict())
        with raises(IncompatibleStateError, "optimizer.state.a.weight", "exclude="):
            _restored(tmp_path, second)
        same(dict(model.state_dict()), dict(before))
    _restored(tmp_path, second, exclude=["optimizer.state.a"])
    found = _by_name(second)
    same(found, {name: expected[name] for name in found})


def test_moments_without_a_parameter_are_refused_by_name_and_nothing_changes(tmp_path):
    _saved(tmp_path, OPTIMIZERS["AdamW"])
    second = _same_program(_Net(("a", "b", "other")), OPTIMIZERS["AdamW"])
    before = copy.deepcopy(_by_name(second))
    with raises(IncompatibleStateError, "optimizer.state.c.weight"):
        _restored(tmp_path, second, missing="ignore")
    same(_by_name(second), before)
    _restored(tmp_path, second, missing="ignore", exclude=["*.c.*"])
    assert second["optimizer"].state[second["model"].a.weight]["step"] == 3


@pytest.mark.parametrize(
    "kind", sampled(OPTIMIZERS, keep=lambda kind: kind in ("SGD", "AdamW", "odd"))
)
@pytest.mark.parametrize("has_another", [False, True])
def test_an_optimizer_that_the_program_does_not_have_is_refused_by_name(
    kind, has_another, tmp_path
):
    _saved(tmp_path, OPTIMIZERS[kind])
    model = _Net()
    second = {"model": model}
    if has_another:
        second["another"] = OPTIMIZERS[kind](model.parameters())
    before = copy.deepcopy(model.state_dict())
    with raises(IncompatibleStateError, "the optimizer 'optimizer'", "exclude=['optimizer']"):
        _restored(tmp_path, second, missing="ignore")
    same(dict(model.state_dict()), dict(before))
    _restored(tmp_path, {"model": model}, exclude=["optimizer"])
    assert not torch.equal(model.a.weight, before["a.weight"])


def _tied(tied, kind):
    torch.manual_seed(0)
    model = _Net(("a", "b"))
    if tied:
        model.b.weight = model.a.weight
    return {"model": model, "optimizer": OPTIMIZERS[kind](model.parameters())}


@pytest.mark.parametrize("kind", sampled(OPTIMIZERS, keep=["AdamW"]))
@pytest.mark.parametrize("untied", [False, True])
def test_a_weight_that_was_tied_has_its_moments_and_one_that_is_no_longer_has_a_line(
    kind, untied, tmp_path, caplog
):
    first, second = _tied(True, kind), _tied(not untied, kind)
    _train(first, 2)
    _save(tmp_path, first)
    with caplog.at_level(logging.WARNING):
        _restored(tmp_path, second)
    same(_by_name(second)["a.weight"][0], _by_name(first)["a.weight"][0])
    assert ("begins anew with them: 'b.weight'" in caplog.text) == untied


@pytest.mark.parametrize("kind", sampled(OPTIMIZERS, keep=["AdamW", "SGD"]))
def test_moments_of_weights_that_are_tied_now_are_refused_by_name(kind, tmp_path):
    first = _tied(False, kind)
    _train(first, 2)
    _save(tmp_path, first)
    if _by_name(first)["b.weight"][0]:
        with raises(IncompatibleStateError, "optimizer.state.b.weight"):
            _restored(tmp_path, _tied(True, kind))
    else:
        _restored(tmp_path, _tied(True, kind))


def test_groups_whose_parameters_had_different_settings_keep_their_own_and_say_so(tmp_path, caplog):
    first = _saved(tmp_path, OPTIMIZERS["AdamW"], differ=True)
    second = {"model": _Net()}
    second["optimizer"] = torch.optim.AdamW(second["model"].parameters(), lr=0.9)
    with caplog.at_level(logging.WARNING):
        _restored(tmp_path, second)
    (group,) = second["optimizer"].param_groups
    assert group["lr"] == 0.9
    assert group["initial_lr"] == 0.7
    assert "keeps its lr" in caplog.text
    again = _restored(tmp_path, _same_program(_Net(), OPTIMIZERS["AdamW"]))
    assert [group["lr"] for group in again["optimizer"].param_groups] == [0.05, 0.3]
    assert _by_name(again).keys() == _by_name(first).keys()


def test_a_setting_that_the_checkpoint_lacks_is_the_programs(tmp_path, caplog):
    _saved(tmp_path, OPTIMIZERS["AdamW"])
    second = _same_program(_Net(), OPTIMIZERS["AdamW"])
    second["optimizer"].param_groups[0]["max_lr"] = 2.0
    with caplog.at_level(logging.INFO):
        _restored(tmp_path, second)
    assert second["optimizer"].param_groups[0]["max_lr"] == 2.0
    assert "keeps its max_lr" in caplog.text


def test_a_restore_gives_the_optimizer_what_its_state_dict_had(tmp_path):
    models, make, given = (_Net(), _Net()), OPTIMIZERS["SGD"], []
    first, second = ({"model": m, "optimizer": make(m.named_parameters())} for m in models)
    first["optimizer"].state[first["model"].a.weight] = torch.arange(4.0)
    _save(tmp_path, first)
    second["optimizer"].register_load_state_dict_pre_hook(lambda _, state: given.append(state))
    _restored(tmp_path, second)
    same(given, [first["optimizer"].state_dict()])


@pytest.mark.parametrize("kind", ["AdamW", "odd"])
def test_settings_may_be_left_out(kind, tmp_path):
    first = _saved(tmp_path, OPTIMIZERS[kind])
    second = _same_program(_Net(), OPTIMIZERS[kind])
    for group in second["optimizer"].param_groups:
        group["lr"] = 0.9
    _restored(tmp_path, second, exclude="optimizer.groups")
    assert [group["lr"] for group in second["optimizer"].param_groups] == [0.9, 0.9]
    found, expected = _by_name(second), _by_name(first)
    for name in expected.keys() - {"global"}:
        same(found[name][0], expected[name][0])


def test_a_nested_state_of_which_a_part_is_left_out_begins_anew(tmp_path):
    expected = _by_name(_saved(tmp_path, OPTIMIZERS["odd"]))
    second = _same_program(_Net(), OPTIMIZERS["odd"])
    _restored(tmp_path, second, exclude="optimizer.state.a.weight.matrices")
    found = _by_name(second)
    assert found["a.weight"][0] == {}
    for name in expected.keys() - {"a.weight"}:
        same(found[name], expected[name])


@pytest.mark.parametrize("saved", [0.25, torch.tensor(0.25)])
@pytest.mark.parametrize("own", [0.5, torch.tensor(0.5)])
def test_a_rate_stays_a_number_or_the_same_tensor(saved, own, tmp_path):
    _saved(tmp_path, _made(torch.optim.AdamW, lr=saved))
    second = _same_program(_Net(), _made(torch.optim.AdamW, lr=own))
    held = second["optimizer"].param_groups[0]["lr"]
    _restored(tmp_path, second)
    rate = second["optimizer"].param_groups[0]["lr"]
    assert float(rate) == 0.25
    assert rate is held if isinstance(own, torch.Tensor) else type(rate) is float


def test_masters_that_no_model_has_come_back_with_their_moments(tmp_path):
    def program(seed):
        torch.manual_seed(seed)
        model = nn.Linear(4, 4).bfloat16()
        masters = [each.detach().float().requires_grad_() for each in model.parameters()]
        return {"model": model, "optimizer": torch.optim.AdamW(masters, lr=0.1)}

    def train(state):
        masters = state["optimizer"].param_groups[0]["params"]
        for each in masters:
            each.grad = torch.ones_like(each)
        state["optimizer"].step()
        return masters

    first, second = program(0), program(1)
    train(first)
    _save(tmp_path, first)
    _restored(tmp_path, second)
    for old, new in zip(train(first), train(second), strict=True):
        same(new.detach(), old.detach())


def test_moments_keep_a_dtype_that_is_not_their_parameters(tmp_path):
    def program():
        model = nn.Linear(4, 4).bfloat16()
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    first, second = program(), program()
    for parameter in first["model"].parameters():
        moments = torch.rand(parameter.shape)
        state = {"step": torch.tensor(3.0), "exp_avg": moments, "exp_avg_sq": moments.double()}
        first["optimizer"].state[parameter] = state
    _save(tmp_path, first)
    _restored(tmp_path, second)
    same(_by_name(second), _by_name(first))


def test_an_optimizer_over_several_models_and_one_over_none_come_back(tmp_path):
    def program(seed):
        torch.manual_seed(seed)
        state = {"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)}
        both = [*state["one"].parameters(), *state["two"].parameters()]
        loose = nn.Parameter(torch.rand(3))
        for each in (*both, loose):
            each.grad = torch.ones_like(each)
        return {**state, "both": torch.optim.AdamW(both), "loose": torch.optim.AdamW([loose])}

    first, second = program(0), program(1)
    first["both"].step(), first["loose"].step()
    _save(tmp_path, first)
    _restored(tmp_path, second)
    for name in ("both", "loose"):
        same(second[name].state_dict(), first[name].state_dict())
    same(*(each["loose"].param_groups[0]["params"][0].detach() for each in (second, first)))


def test_a_model_that_was_on_the_meta_device_trains_on_after_the_restore(tmp_path):
    first = _saved(tmp_path, OPTIMIZERS["AdamW"])
    with torch.device("meta"):
        model = _Net()
    for restore in (
        functools.partial(_restored, tmp_path),
        functools.partial(load, latest(tmp_path)),
    ):
        with raises(ConfigurationError, "meta device", "to_empty"):
            restore({"model": model})
    model.to_empty(device="cpu")
    second = _restored(tmp_path, _same_program(model, OPTIMIZERS["AdamW"]))
    _train(first, 2, seed=9)
    _train(second, 2, seed=9)
    same(_by_name(second), _by_name(first))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_optimizer_of_all_parameters_comes_back_and_refuses_another_order(steps, tmp_path):
    def program(reverse):
        model = _Net()
        parameters = list(model.parameters())
        return {"model": model, "optimizer": torch.optim.LBFGS(parameters[:: -1 if reverse else 1])}

    def train(state):
        def closure():
            state["optimizer"].zero_grad()
            loss = state["model"](torch.ones(2, 4)).square().sum()
            loss.backward()
            return loss

        return state["optimizer"].step(closure)

    first = program(False)
    for _ in range(steps):
        train(first)
    _save(tmp_path, first)
    if steps:
        with raises(IncompatibleStateError, "another order"):
            _restored(tmp_path, program(True))
    again = _restored(tmp_path, program(False))
    same(_by_name(again), _by_name(first))
    assert train(again) == train(first)


class _Blockwise(torch.optim.Optimizer):
    """Its moments are of a class that it alone can make, by an attribute that ``copy.copy()`` loses."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self.seed = 1

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["moment"] = blocks(seed=self.seed + len(state))


def test_wrapper_subclasses_are_made_by_a_copy_of_the_optimizer(tmp_path):
    def program():
        model = nn.Linear(4, 4)
        return {"model": model, "optimizer": _Blockwise(model.parameters())}

    first, second = program(), program()
    for _ in range(2):
        first["optimizer"].step()
    _save(tmp_path, first)
    steps = []
    second["optimizer"].register_step_pre_hook(lambda *_: steps.append(1))
    _restored(tmp_path, second)
    assert steps == []
    _save(tmp_path / "again", second)  # the moments are there once, not as their parts, too
    for name in ("weight", "bias"):
        old, new = (
            each["optimizer"].state[getattr(each["model"], name)] for each in (first, second)
        )
        assert new.keys() == old.keys()
        assert torch.equal(new["moment"].dense(), old["moment"].dense())
