"""States to save: every dtype, every awkward shape."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

_CANDIDATES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("complex32", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
DTYPES = tuple(getattr(torch, name) for name in _CANDIDATES if hasattr(torch, name))


def filled(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of random *bits* (NaNs and all), reproducible; bool keeps to 0 and 1."""
    generator = torch.Generator().manual_seed(seed + 1)
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        top = 2 if dtype is torch.bool else 256
        raw = torch.randint(
            0, top, (tensor.numel() * dtype.itemsize,), dtype=torch.uint8, generator=generator
        )
        tensor.view(-1).view(torch.uint8).copy_(raw)
    return tensor


def large(mebibytes: int, tensors: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    """``mebibytes`` of float32 in so many tensors."""
    elements = mebibytes * (1 << 20) // 4 // tensors
    return {
        f"weight{number}": filled((elements,), torch.float32, seed * 1000 + number)
        for number in range(tensors)
    }


@dataclass
class Opinion:
    """A picklable object of a class of its own."""

    name: str
    weights: list[float] = field(default_factory=list)
    noise: random.Random = field(default_factory=lambda: random.Random(7), compare=False)
