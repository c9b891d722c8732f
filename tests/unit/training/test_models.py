"""Models by the names that torch would give."""

import gc
import random
import weakref

import pytest
import torch
import torch.distributed.checkpoint.state_dict as torchs
from support.state.checkpoints import assert_same
from support.tiers import sampled
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import SGD, AdamW

from dcp_datastates import CheckpointManager, load, save
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.training.models import are_parts, load_model_state, model_state
from dcp_datastates.training.optimizers import OptimizerPart


def _state_of(model, optimizer):
    return OptimizerPart("optimizer", optimizer, {"model": [model]}).state_dict().get("state", {})


class _Counts(nn.Module):
    """A module with an extra state, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.count = 0

    def forward(self, x):
        self.count += 1
        return self.inner(x) + self.mean

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


class _Prefixed(nn.Module):
    """Like a wrapper for DDP: all lies below ``module.``, which torch leaves out for DDP alone."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def _model(rng):
    layers = [rng.choice([nn.Linear(3, 3), _Counts(), nn.LayerNorm(3)]) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(3, 3))
    kind = rng.choice(["plain", "tied", "compiled", "prefixed", "partly"])
    if kind == "tied":
        model[-1].weight = nn.Parameter(torch.eye(3))
        model.append(nn.Linear(3, 3))
        model[-1].weight = model[-2].weight
    if kind == "compiled":
        return torch.compile(model, backend="eager")
    if kind == "prefixed":
        return _Prefixed(model)
    if kind == "partly":
        model[0] = torch.compile(model[0], backend="eager")
    return model


def _optimizer(model, rng):
    parameters = [each for each in model.parameters() if each.requires_grad]
    cut = rng.randrange(1, len(parameters))
    kind = rng.choice([AdamW, lambda groups: SGD(groups, lr=0.1, momentum=0.9)])
    return kind([{"params": parameters[:cut], "lr": 0.1}, {"params": parameters[cut:], "lr": 0.2}])


def _inner(model):
    return getattr(model, "_orig_mod", getattr(model, "module", model))


def _change(model, optimizer, rng):
    """What a program may do between two saves; returns the optimizer to go on with."""
    inner = _inner(model)
    match rng.randrange(10):
        case 0:
            inner.append(nn.Linear(3, 3))
        case 1:
            inner[-1].register_buffer(f"extra{rng.randrange(100)}", torch.ones(2))
        case 2:  # the optimizer does not know the new one
            inner[-1].weight = nn.Parameter(torch.ones(3, 3))
        case 3:
            inner.add_module(f"named{rng.randrange(100)}", nn.Linear(3, 3))
            optimizer.add_param_group({"params": list(inner[-1].parameters())})
        case 4:
            next(model.parameters()).requires_grad_(False)
        case 5:
            return _optimizer(model, rng)
        case 6:
            optimizer.state.pop(next(iter(optimizer.state), None), None)
        case 7:  # the same names, other places
            inner[0], inner[-1] = inner[-1], inner[0]
        case 8:
            optimizer.param_groups[0]["lr"] *= 0.5
        case 9:  # the same place, another name
            last = inner[-1]
            del inner[-1]
            inner.add_module(f"renamed{rng.randrange(100)}", last)
    return optimizer


def _step(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()


def _result(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return type(error)


def _same(ours, torchs_):
    if isinstance(torchs_, dict):
        assert ours.keys() == torchs_.keys()
        for key in torchs_:
            _same(ours[key], torchs_[key])
    elif isinstance(torchs_, list):
        assert len(ours) == len(torchs_)
        for mine, other in zip(ours, torchs_, strict=True):
            _same(mine, other)
    elif isinstance(torchs_, torch.Tensor):
        assert ours.data_ptr() == torchs_.data_ptr()
        assert ours.shape == torchs_.shape
        assert ours.requires_grad == torchs_.requires_grad
    else:
        assert ours == torchs_


@pytest.mark.parametrize("seed", sampled(range(200), keep=range(12)))
def test_whatever_a_program_changes_the_names_are_those_of_torch(seed):
    rng = random.Random(seed)
    model = _model(rng)
    optimizer = _optimizer(model, rng)
    for _ in range(12):
        _step(model, optimizer)
        expected = _result(torchs.get_model_state_dict, model)
        if isinstance(expected, dict):
            _same(model_state([model]), expected)
        expected = _result(torchs.get_optimizer_state_dict, model, optimizer)
        # Torch refuses the buffers' names, and parameters without a state.
        if isinstance(expected, dict):
            _same(_state_of(model, optimizer), expected["state"])
        if rng.random() < 0.5:
            optimizer = _change(model, optimizer, rng)


def test_no_model_is_kept_alive():
    model = nn.Sequential(nn.Linear(3, 3))
    optimizer = AdamW(model.parameters())
    _step(model, optimizer)
    model_state([model])
    _state_of(model, optimizer)
    gone = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [each() for each in gone] == [None, None]


class _Fused(nn.Module):
    """Its hooks split a parameter at a save, and join the parts at a load."""

    def __init__(self):
        super().__init__()
        self.qk = nn.Parameter(torch.randn(4, 3))
        self._register_state_dict_hook(self._split)
        self._register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _split(module, state, prefix, _):
        qk = state.pop(f"{prefix}qk")
        state[f"{prefix}q"], state[f"{prefix}k"] = qk[:2], qk[2:]

    def _join(self, state, prefix, *_):
        state[f"{prefix}qk"] = torch.cat([state.pop(f"{prefix}q"), state.pop(f"{prefix}k")])


def test_hooks_may_split_and_rename_parameters():
    first, second = (nn.Sequential(_Fused(), nn.Linear(2, 2)) for _ in range(2))
    state = model_state([first])
    assert sorted(state) == ["0.k", "0.q", "1.bias", "1.weight"]
    load_model_state([second], {name: value.clone() for name, value in state.items()})
    assert torch.equal(second[0].qk, first[0].qk)


class _Versioned(nn.Linear):
    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].T
        super()._load_from_state_dict(state, prefix, metadata, *rest)


WRAPS = {
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "checkpointed": checkpoint_wrapper,
    "both": lambda module: checkpoint_wrapper(torch.compile(module, backend="eager")),
    "the other way": lambda module: torch.compile(checkpoint_wrapper(module), backend="eager"),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("whole", [False, True])
def test_wrappers_change_no_name_and_states_pass_between_all(wrap, whole):
    plain = nn.Sequential(_Versioned(3, 3), nn.Linear(3, 3))
    wrapped = nn.Sequential(WRAPS[wrap](_Versioned(3, 3)), nn.Linear(3, 3))
    wrapped = WRAPS[wrap](wrapped) if whole else wrapped
    assert model_state([wrapped]).keys() == model_state([plain]).keys()
    load_model_state([wrapped], {n: each.clone() for n, each in model_state([plain]).items()})
    assert_same(model_state([wrapped]), model_state([plain]))


def test_two_values_that_become_one_name_are_refused():
    model = nn.Module()
    model.a = nn.Linear(2, 2)
    model.a.add_module("_orig_mod", nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match=r"'a\.weight'"):
        model_state([model])


def test_parts_of_a_model_have_its_names_and_load_from_each_other():
    class Part(nn.Module):
        def __init__(self, *numbers):
            super().__init__()
            self.layers = nn.ModuleDict({str(n): nn.Linear(2, 2) for n in numbers})

    whole, parts = Part(0, 1, 2), [Part(0, 2), Part(1)]
    assert are_parts(parts)
    assert not are_parts([Part(0), Part(0)])
    load_model_state(parts, {n: each.clone() for n, each in model_state([whole]).items()})
    assert_same(model_state(parts), model_state([whole]))


def _restored(path, state, **options):
    with CheckpointManager(path.parent, every=1, save_last=False) as manager:
        manager.restore(1, state, **options)


@pytest.mark.parametrize("restored", [load, _restored])
def test_a_part_on_the_meta_device_may_be_left_out(restored, tmp_path):
    """The rest is loaded, as into any model; what is left out has no memory still."""
    save({"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))}, tmp_path / "step-1")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ConfigurationError, match="meta device"):
        restored(tmp_path / "step-1", {"model": model})
    restored(tmp_path / "step-1", {"model": model}, exclude="model.1")
    stored = load(tmp_path / "step-1", only="model.0")["model"]
    assert_same(model[0].state_dict(), {name[2:]: value for name, value in stored.items()})
    assert model[1].weight.is_meta
