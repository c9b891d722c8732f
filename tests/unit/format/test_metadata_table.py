"""A checkpoint's chunks in columns."""

from __future__ import annotations

import numpy as np

from dcp_datastates.format.metadata_table import Catalog
from dcp_datastates.format.ragged import positions, starts_of


def test_rows_belong_to_their_names():
    catalog = Catalog(
        names=("a", "o", "b"),
        table=(),
        properties=np.array([0, -1, 0]),
        ndims=np.array([1, 0, 2]),
        shapes=np.zeros(3, np.int64),
        counts=np.array([2, 0, 1]),
        offsets=np.zeros(4, np.int64),
        sizes=np.zeros(4, np.int64),
        mappings=None,
    )
    assert catalog.owners().tolist() == [0, 0, 2, 1]
    ndims = catalog.ndims[[0, 0, 2]]
    assert positions(starts_of(ndims), ndims).tolist() == [0, 1, 2, 3]
