"""The model that the steps train: smaller than the benchmark's, so that ten minutes do."""

from __future__ import annotations

from gpu_first.step import Options
from gpu_job import Shape

__all__ = ["shape_of"]

_LARGE = Shape(layers=4)
"""4 GB of parameters and AdamW."""
_TINY = Shape(width=384, layers=2, heads=2, vocabulary=1000, sequence=16, batch=2)
"""More than the smallest host cache holds."""


def shape_of(options: Options) -> Shape:
    chosen = _TINY if options.tiny else _LARGE
    return Shape(**{**vars(chosen), "device": options.device})
