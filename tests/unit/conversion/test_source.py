"""The groups in which the tensors of a source are read, and of which files consist."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_datastates.conversion.source import as_bytes
from dcp_datastates.conversion.torch_file import torch_source


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 500))
def test_groups_are_all_tensors_in_order_and_bounded(tmp_path_factory, lengths, most):
    state = {f"t{number}": torch.arange(length) for number, length in enumerate(lengths)}
    path = tmp_path_factory.mktemp("groups") / "in"
    torch.save(state, path)
    source = torch_source(path, False)
    groups = source.groups(state, most)
    assert list(itertools.chain.from_iterable(groups)) == list(state)
    for names in groups:
        found = source.read(names)
        assert [as_bytes(each) for each in found] == [as_bytes(state[name]) for name in names]
        sizes = [each.nbytes for each in found if each.nbytes]
        assert sum(sizes) <= most or len(sizes) == 1
