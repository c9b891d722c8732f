"""What a tensor was when it was saved is what it is when it is loaded, bit for bit."""

import pytest
import torch
from support.state.checkpoints import assert_same, clone, load, put, save, zeros
from support.state.states import DTYPES, filled

SHAPES = [(), (0,), (1,), (3, 0, 2), (7, 5), (2, 3, 4, 5), (40_000,)]


BASE = torch.arange(2 * 300 * 400, dtype=torch.float32).view(2, 300, 400)
LAZY = torch.randn(100, 200, dtype=torch.complex64).conj()
assert LAZY.is_conj()
assert LAZY.imag.is_neg()
TIED = filled((200, 200), torch.float32)
SIZES = [1, 8 << 20, (8 << 20) - 1, (8 << 20) + 1, (1 << 20) + 3, 4096, 20_000_003]
STATES = {
    "dtypes and shapes": lambda: {
        f"{dtype} {shape}": filled(shape, dtype, seed)
        for dtype in DTYPES
        for seed, shape in enumerate(SHAPES)
    },
    "not contiguous": lambda: {
        "transposed": BASE[0].t(),
        "permuted": BASE.permute(2, 0, 1),
        "strided": BASE[1, ::3, ::2],
        "column": BASE[0, :, 7],
        "offset": BASE[1, 5:, 3:],
        "expanded": BASE[0, :1, :].expand(64, 400),
        "scalar expanded": torch.tensor(3.5).expand(50, 700),
        "diagonal": BASE[0].diagonal(),
        "unfolded": torch.arange(50_000.0).unfold(0, 7, 3),
        "channels last": torch.randn(2, 8, 40, 40).to(memory_format=torch.channels_last),
        "flipped": BASE[0].flip(0),
    },
    "conjugated and negated": lambda: {"conjugate": LAZY, "negative": LAZY.imag},
    "tied": lambda: {"embedding": TIED, "head": TIED, "view": TIED[20:], "detached": TIED.detach()},
    "larger than segments and blocks": lambda: {
        str(size): filled((size,), torch.uint8, size) for size in SIZES
    },
    "thousands": lambda: {
        f"layer.{n}": filled((n % 17, n % 5), torch.bfloat16, n) for n in range(3000)
    },
}

both_ways = pytest.mark.parametrize("how", ["save", "async_save"])


@both_ways
@pytest.mark.parametrize("kind", STATES)
def test_tensors_come_back(kind, how, place):
    state = STATES[kind]()
    expected = {name: each.resolve_conj().resolve_neg().clone() for name, each in state.items()}
    put(how, state, place)
    assert_same(load(zeros(expected), place), expected)


def test_loading_fills_the_target_in_place_whatever_its_strides(tmp_path):
    saved = {name: filled((60, 80), torch.float32, seed) for seed, name in enumerate("abc")}
    save(saved, tmp_path)
    base = torch.full((120, 160), 9.0)
    target = {"a": torch.zeros(80, 60).t(), "b": base[::2, ::2], "c": torch.zeros(60, 80)}
    addresses = {name: tensor.data_ptr() for name, tensor in target.items()}
    loaded = load(dict(target), tmp_path)
    for name, tensor in target.items():
        assert loaded[name] is tensor, "dcp.load fills tensors in place"
        assert tensor.data_ptr() == addresses[name]
    assert_same(target, saved)
    assert bool((base[1::2] == 9).all()), "bytes beside the target were touched"
    assert bool((base[:, 1::2] == 9).all())


@both_ways
def test_parameters_come_back_and_keep_what_they_are(how, place):
    state = {
        "parameter": torch.nn.Parameter(torch.randn(300, 100)),
        "leaf": torch.randn(3, requires_grad=True),
        "buffer": torch.nn.Buffer(torch.randn(100)),
    }
    expected = clone(state)
    put(how, state, place)
    target = {"parameter": torch.nn.Parameter(torch.zeros(300, 100)), "leaf": torch.zeros(3)}
    target["buffer"] = torch.zeros(100)
    load(target, place)
    assert isinstance(target["parameter"], torch.nn.Parameter)
    assert target["parameter"].requires_grad
    assert_same(target, expected)
