"""What a tensor was when it was saved is what it is when it is loaded, bit for bit."""

from __future__ import annotations

import pytest
import torch
from support.state.checkpoints import assert_same, clone, load, load_everything, put, save, zeros
from support.state.states import DTYPES, filled

SHAPES = [(), (0,), (1,), (3, 0, 2), (7, 5), (2, 3, 4, 5), (40_000,)]


both_ways = pytest.mark.parametrize("how", ["save", "async_save"])


@both_ways
def test_every_dtype_and_shape_comes_back(how, place):
    state = {
        f"{dtype} {shape}": filled(shape, dtype, seed)
        for dtype in DTYPES
        for seed, shape in enumerate(SHAPES)
    }
    put(how, state, place)
    assert_same(load(zeros(state), place), state)
    assert_same(load_everything(place), state)


def _views():
    base = torch.arange(2 * 300 * 400, dtype=torch.float32).view(2, 300, 400)
    return {
        "transposed": base[0].t(),
        "permuted": base.permute(2, 0, 1),
        "strided": base[1, ::3, ::2],
        "column": base[0, :, 7],
        "offset": base[1, 5:, 3:],
        "expanded": base[0, :1, :].expand(64, 400),
        "scalar expanded": torch.tensor(3.5).expand(50, 700),
        "diagonal": base[0].diagonal(),
        "unfolded": torch.arange(50_000.0).unfold(0, 7, 3),
        "channels last": torch.randn(2, 8, 40, 40).to(memory_format=torch.channels_last),
        "flipped": base[0].flip(0),
    }


@both_ways
def test_non_contiguous_tensors_come_back(how, place):
    state = _views()
    assert not state["transposed"].is_contiguous()
    expected = clone(state)
    put(how, state, place)
    assert_same(load(zeros(state), place), expected)


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
def test_lazily_conjugated_and_negated_tensors_hold_their_values(how, place):
    plain = torch.randn(100, 200, dtype=torch.complex64)
    state = {"conjugate": plain.conj(), "negative": plain.conj().imag}
    assert state["conjugate"].is_conj()
    assert state["negative"].is_neg()
    expected = {name: tensor.resolve_conj().resolve_neg().clone() for name, tensor in state.items()}
    put(how, state, place)
    assert_same(load(zeros(expected), place), expected)


@both_ways
def test_tied_tensors_and_overlapping_views_each_come_back(how, tmp_path):
    base = filled((200, 200), torch.float32)
    state = {"embedding": base, "head": base, "view": base[20:, :], "detached": base.detach()}
    put(how, state, tmp_path)
    assert_same(load(zeros(state), tmp_path), state)


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


@both_ways
def test_tensors_larger_than_segments_and_blocks_come_back(how, place):
    sizes = [1, 8 << 20, (8 << 20) - 1, (8 << 20) + 1, (1 << 20) + 3, 4096, 20_000_003]
    state = {str(size): filled((size,), torch.uint8, size) for size in sizes}
    put(how, state, place)
    assert_same(load(zeros(state), place), state)


@both_ways
def test_thousands_of_tensors_come_back(how, tmp_path):
    state = {f"layer.{n}": filled((n % 17, n % 5), torch.bfloat16, n) for n in range(3000)}
    put(how, state, tmp_path)
    assert_same(load(zeros(state), tmp_path), state)
