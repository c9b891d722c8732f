"""Whatever boxes a tensor is saved in, by whatever ranks, it loads in any other boxes as the dense one."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.state.checkpoints import assert_same, load_everything
from support.state.chunks import boxes, load_by_ranks, save_by_ranks
from support.state.files import data_files, read_file
from support.state.states import DTYPES, filled
from support.tiers import sampled

examples = settings(suppress_health_check=list(HealthCheck), max_examples=30)

shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 13, 40]), max_size=4).map(tuple)


@st.composite
def tensors(draw):
    """By name: a dense tensor."""
    found = {}
    for number in range(draw(st.integers(0, 4))):
        shape = draw(shapes)
        if draw(st.integers(0, 9)) == 0:
            shape = (draw(st.integers(200_000, 1_200_000)), 2)[: draw(st.integers(1, 2))]
        found[f"t{number}"] = filled(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    return found


@st.composite
def dealt(draw, dense, ranks):
    """Each tensor cut into a grid, and the boxes dealt to ranks; every box to exactly one."""
    pieces = [{name: (tensor, []) for name, tensor in dense.items()} for _ in range(ranks)]
    for name, tensor in dense.items():
        cuts = [draw(st.lists(st.integers(0, max(size, 1)), max_size=3)) for size in tensor.shape]
        for box in boxes(tensor.shape, cuts):
            pieces[draw(st.integers(0, ranks - 1))][name][1].append(box)
    return pieces


@pytest.mark.parametrize("_run", sampled(range(10), keep=[0]))
@examples
@given(data=st.data())
def test_any_boxes_load_as_any_other_boxes(_run, data):
    dense = data.draw(tensors())
    saved = data.draw(dealt(dense, data.draw(st.integers(1, 6))))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "c")
        save_by_ranks(path, saved)
        target = {
            name: torch.zeros(t.shape, dtype=torch.uint8).to(t.dtype) for name, t in dense.items()
        }
        load_by_ranks(path, data.draw(dealt(target, data.draw(st.integers(1, 6)))))
        assert_same(target, dense)
        assert_same(load_everything(path), dense)


@pytest.mark.parametrize("_run", sampled(range(5), keep=[0]))
@examples
@given(data=st.data())
def test_every_saved_box_lies_whole_in_exactly_one_file(_run, data):
    dense = data.draw(tensors())
    ranks = data.draw(st.integers(1, 4))
    saved = data.draw(dealt(dense, ranks))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "c")
        save_by_ranks(path, saved)
        stored = {name: [] for name in dense}
        for file in map(read_file, data_files(path)):
            for key in set(file.header) & set(dense):
                stored[key].append(file.content(key))
        for name, tensor in dense.items():
            expected = sorted(
                bytes(box.of(tensor).contiguous().view(-1).view(torch.uint8).numpy())
                if box.of(tensor).numel()
                else b""
                for pieces in saved
                for box in pieces[name][1]
            )
            assert sorted(stored[name]) == expected
