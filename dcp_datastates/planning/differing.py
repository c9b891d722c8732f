"""Values that ranks hold under one name, and that nothing declares equal: the lowest of these ranks writes its own.

What the others hold is lost then. So all compare digests in the vote, and a difference is named. It is no error:
programs save a loss or a time of each rank under one name, and mean the first rank's. Nothing is lost where another
rank has None or an empty container: many programs have a value on the first rank only.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import torch

__all__ = ["is_nothing", "say", "word_of"]

logger = logging.getLogger(__name__)

_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_MOST_LOOKED_AT: Final = 2048
"""Values in a value: training waits for this."""


def is_nothing(value: Any) -> bool:
    """Whether nothing is lost with it."""
    return value is None or (isinstance(value, (Collection, str, bytes)) and not len(value))


def word_of(value: Any) -> int:
    """A digest of 64 bits, which is equal on all ranks for equal values. Of large values it covers the beginning."""
    digest = blake2b(digest_size=8)
    _look(value, digest, [_MOST_LOOKED_AT])
    return int.from_bytes(digest.digest(), "little")


def _look(value: Any, digest: Any, left: list[int]) -> None:
    left[0] -= 1
    if left[0] < 0:
        return
    kind = type(value)
    digest.update(f"{kind.__qualname__}:".encode())
    if kind in _PLAIN:
        digest.update(repr(value).encode("utf-8", "surrogatepass"))
    elif isinstance(value, torch.Tensor):
        digest.update(repr((tuple(value.shape), value.dtype)).encode())
        if type(value) is torch.Tensor and value.is_cpu and value.layout is torch.strided:
            first = value.detach().reshape(-1)[:_MOST_LOOKED_AT].resolve_conj().resolve_neg()
            digest.update(first.contiguous().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        digest.update(repr((value.shape, value.dtype)).encode())
        if not value.dtype.hasobject:
            digest.update(value.reshape(-1)[:_MOST_LOOKED_AT].tobytes())
    elif isinstance(value, Mapping):
        digest.update(b"%d" % len(value))
        for key, each in value.items():
            _look(key, digest, left)
            _look(each, digest, left)
    elif isinstance(value, (set, frozenset)):
        words = sorted(map(word_of, value)) if len(value) <= left[0] else [len(value)]
        digest.update(repr(words).encode())
    elif isinstance(value, Sequence):
        digest.update(b"%d" % len(value))
        for each in value[: max(left[0], 0)]:
            _look(each, digest, left)
    else:
        with contextlib.suppress(Exception):  # it is stored by a way of its own
            made = value.__reduce_ex__(2)
            _look(made if isinstance(made, str) else made[1:3], digest, left)


@lru_cache(maxsize=1024)
def say(names: str, ranks: tuple[int, int]) -> None:
    """Warn, once per process, on the coordinator."""
    logger.warning(
        "rank %d and rank %d hold different values of %s: the checkpoint has those of the lowest rank that holds them, "
        "and the others are lost. To keep each rank's, mark the object with PerRank(…) in the manager's state, or give "
        "each rank's value a name of its own. (Buffers under DistributedDataParallel are meant to be the first rank's)",
        *ranks,
        names,
    )
