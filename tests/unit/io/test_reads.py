"""Requests: what contradicts itself is damage, whatever made it."""

from __future__ import annotations

import pytest
import torch
from support.state.checkpoints import raises

from dcp_datastates.errors import CheckpointCorruptError
from dcp_datastates.io.reads import Request, aim, contents


@pytest.mark.parametrize(
    ("stored", "offsets", "said"),
    [(24, (1, 0), "reads [1, 3) of 2"), (24, (0, -1), "reads [-1, 2)"), (20, (0, 0), "20 bytes")],
)
def test_a_region_that_leaves_its_chunk_is_damage(stored, offsets, said):
    request = Request("w", "file", 0, stored, None, torch.float32, (2, 3), offsets, (2, 3))
    aim([request], [torch.zeros(2, 3)], cast=False)
    with raises(CheckpointCorruptError, "'w'", said):
        contents([request])
