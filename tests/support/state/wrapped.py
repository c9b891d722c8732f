"""Wrapper subclasses of the tests: tensors that consist of other tensors, as torchao's do."""

from __future__ import annotations

from typing import Any

import torch

BLOCK = 2


class Blocks(torch.Tensor):
    """Codes, and a scale for each block of two rows. It can be cut between blocks only."""

    codes: torch.Tensor
    scales: torch.Tensor
    label: Any

    @staticmethod
    def __new__(
        cls: type[Blocks], codes: torch.Tensor, scales: torch.Tensor, label: Any = None
    ) -> Blocks:
        made = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )
        made.codes, made.scales, made.label = codes, scales, label
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], self.label

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], label: Any, size: Any, stride: Any
    ) -> Blocks:
        return cls(inner["codes"], inner["scales"], label)

    def dense(self) -> torch.Tensor:
        return self.codes * self.scales.repeat_interleave(BLOCK)[:, None]

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0]
        if function is torch.ops.aten.copy_.default:
            source = args[1]
            if isinstance(source, Blocks):
                first.codes.copy_(source.codes)
                first.scales.copy_(source.scales)
            else:
                first.codes.copy_(source)
                first.scales.fill_(1)
            return first
        if function is torch.ops.aten.slice.Tensor:
            dimension, begin, end = args[1:4]
            if dimension or begin % BLOCK or end % BLOCK:
                raise ValueError("not between blocks")
            scales = first.scales[begin // BLOCK : end // BLOCK]
            return cls(first.codes[begin:end], scales, first.label)
        if function in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(first.codes, first.scales, first.label)
        if function is torch.ops.aten.is_pinned.default:  # DCP's planner asks
            return False
        raise NotImplementedError(str(function))


class Other(Blocks):
    """The same parts, another class."""


class Sometimes(Blocks):
    """One with a third part, which may be None."""

    zero: torch.Tensor | None = None

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names, label = super().__tensor_flatten__()
        return names + ["zero"] * (self.zero is not None), label


def blocks(
    rows: int = 8, columns: int = 3, seed: int = 0, kind: type[Blocks] = Blocks, label: Any = None
) -> Blocks:
    """Made-up values; zeros for seed 0."""
    numbers = torch.Generator().manual_seed(seed)
    codes = torch.randint(-100, 100, (rows, columns), generator=numbers, dtype=torch.int8)
    scales = torch.rand(rows // BLOCK, generator=numbers)
    return kind(codes * bool(seed), scales * bool(seed), label)
