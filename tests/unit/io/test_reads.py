"""Reads: what contradicts itself is damage, whatever made it."""

from __future__ import annotations

import pytest
import torch
from support.state.checkpoints import raises
from support.state.chunks import reads_of_rows

from dcp_datastates.errors import CheckpointCorruptError


@pytest.mark.parametrize(
    ("stored", "offsets", "said"),
    [(24, (1, 0), "reads [1, 3) of 2"), (24, (0, -1), "reads [-1, 2)"), (20, (0, 0), "20 bytes")],
)
def test_a_region_that_leaves_its_chunk_is_damage(stored, offsets, said):
    reads = reads_of_rows(("w", "file", 0, stored, torch.float32, (2, 3), offsets, (2, 3)))
    reads.aim([torch.zeros(2, 3)], cast=False)
    with raises(CheckpointCorruptError, "'w'", said):
        reads.contents()
