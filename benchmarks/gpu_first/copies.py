"""Step 2: bare copies between host and GPU: pinned and pageable, large, of 8 MiB, and of 64 KiB."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from gpu_first.step import Findings, Options, main, synchronize

_ONE = 1 << 30
_PIECE = 8 << 20
_SMALL = 64 << 10
_TURNS = 4


def measure(options: Options, findings: Findings) -> None:
    scale = 64 if options.tiny else 1
    one, piece, small = _ONE // scale, _PIECE // scale, _SMALL // scale
    on_gpu = options.device == "cuda"
    device = torch.ones(one, dtype=torch.uint8, device=options.device)
    began = time.perf_counter()
    pinned = torch.zeros(one, dtype=torch.uint8, pin_memory=on_gpu)
    findings.note("pin_seconds_per_gib", (time.perf_counter() - began) * (1 << 30) / one)
    pageable = torch.ones(one, dtype=torch.uint8)
    for kind, host in (("pinned", pinned), ("pageable", pageable)):
        for way, to, source in (("d2h", host, device), ("h2d", device, host)):
            for name, nbytes in (("one", one), ("pieces", piece)):
                label = f"{way}_{kind}_{name}"
                with findings.part(label):
                    findings.note(label, rate(options.device, to, source, nbytes))
    for way, to, source in (("d2h", pinned, device), ("h2d", device, pinned)):
        label, total = f"{way}_pinned_small", one // 8
        findings.note(label, rate(options.device, to[:total], source[:total], small))


def rate(device: str, to: torch.Tensor, source: torch.Tensor, piece: int) -> float:
    """Bytes per second of copies of ``piece`` bytes each, which nothing waits for but the last."""
    pairs = list(zip(to.split(piece), source.split(piece), strict=True))

    def copy() -> None:
        for into, out_of in pairs:
            into.copy_(out_of, non_blocking=True)

    return to.nbytes / _seconds(device, copy)


def _seconds(device: str, copy: Callable[[], None]) -> float:
    """The median. Host time: what the calls take counts, too."""
    found = []
    for _ in range(_TURNS + 1):  # the first warms up
        synchronize(device)
        began = time.perf_counter()
        copy()
        synchronize(device)
        found.append(time.perf_counter() - began)
    return median(found[1:])


if __name__ == "__main__":
    sys.exit(main(measure))
