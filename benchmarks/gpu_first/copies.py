"""Bare copies between host and GPU: pinned and pageable, of 1 GiB, of 8 MiB, and of 64 KiB."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.utils.benchmark import Timer

from gpu_first.step import Options, Part, main

_PIECES = {"1 GiB": 1 << 30, "8 MiB each": 8 << 20, "64 KiB each": 64 << 10}


def parts(options: Options) -> Iterator[Part]:
    total = (1 << 30) // (64 if options.tiny else 1)
    on_gpu = options.device == "cuda"
    device = torch.ones(total, dtype=torch.uint8, device=options.device)
    pinning = Timer("torch.ones(total, dtype=torch.uint8, pin_memory=on_gpu)", globals=locals())
    yield "torch pins GiB/s", lambda: total / (1 << 30) / pinning.timeit(1).mean
    for kind in ("pinned", "pageable"):
        host = torch.ones(total, dtype=torch.uint8, pin_memory=on_gpu and kind == "pinned")
        yield f"{kind} D2H", partial(rates, host, device)
        yield f"{kind} H2D", partial(rates, device, host)


def rates(to: torch.Tensor, source: torch.Tensor) -> dict[str, float]:
    """GB/s of copies of each size, which nothing waits for but the last. Host time: what the calls take counts."""
    found = {}
    for name, piece in _PIECES.items():
        pairs = list(zip(to.split(piece), source.split(piece), strict=True))
        copies = "for into, out_of in pairs: into.copy_(out_of, non_blocking=True)"
        copying = Timer(copies, globals={"pairs": pairs})
        found[f"{name} GB/s"] = to.nbytes / copying.timeit(4).mean / 1e9
    return found


if __name__ == "__main__":
    main(parts)
