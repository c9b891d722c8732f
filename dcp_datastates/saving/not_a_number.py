"""NaN in what is saved: a line of the log by name, or a failed save (``on_nan``).

A few elements are looked at, in the background: of each tensor that was copied at the call (those below 64 KiB, also
from devices: biases, norms, statistics) and, in turn, of some that are read later from the host. One bad step of an
optimizer makes all of a model NaN, so it shows there. Metrics that are given are looked at, too.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import os
from collections.abc import Iterator
from functools import lru_cache
from itertools import compress, count
from typing import Final

import torch

from dcp_datastates.errors import SaveFailedError
from dcp_datastates.format.contents import some_of
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.staging.stage import StagedState

logger = logging.getLogger(__name__)

_DTYPE: Final = operator.attrgetter("dtype")
_KINDS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PLACES: Final = torch.tensor([0.0, 0.4, 0.7, 1.0], dtype=torch.float64, device="cpu")
_LATER: Final = 64
"""How many tensors that are read later are looked at in one save."""


def look_for_nan(save: SaveOperation) -> None:
    """Look at the elements, which are as at the call. Raises :class:`SaveFailedError` with ``on_nan="refuse"``."""
    found = []
    if save.group.rank_set.rank == 0:  # whose metrics are stored
        numbers = save.metrics.items()
        found += [f"metrics.{name}" for name, number in numbers if math.isnan(number)]
    if (staged := save.reads.kept) is not None:
        found += [*_copied(staged), *_read_later(staged, save.number)]
    if not found:
        return
    if save.config.on_nan == "refuse":
        raise SaveFailedError(
            f'there is NaN in {some_of(found)}, and on_nan="refuse" fails such saves; older checkpoints stay'
        )
    _warn(some_of(found))


@lru_cache(maxsize=256)
def _warn(names: str) -> None:
    """Once per process for the same names: a run that has gone wrong saves on."""
    logger.warning(
        'there is NaN in %s, which is saved, and perhaps elsewhere; on_nan="refuse" fails such saves',
        names,
    )


def _copied(staged: StagedState) -> Iterator[str]:
    """The names of tensors among the eager copies that have NaN. Not of a state with sparse or complex tensors, say."""
    if not staged.is_cacheable:
        return  # the copies are not in the order of the traversal
    columns = staged.traversal.columns
    eager = list(compress(count(), map(operator.not_, staged.is_deferred)))
    tensors = [columns.locals[at] for at in eager]
    dtypes, sizes = list(map(_DTYPE, tensors)), list(map(torch.Tensor.numel, tensors))
    staged.copying.wait()
    for kind in _KINDS:
        rows = [
            (at, offset // kind.itemsize, size - 1)
            for at, offset, dtype, size in zip(eager, staged.offsets, dtypes, sizes, strict=True)
            if dtype is kind and size
        ]
        if not rows:
            continue
        numbers, starts, lasts = torch.tensor(rows, dtype=torch.int64, device="cpu").unbind(1)
        elements = staged.buffer[: staged.buffer.nbytes // kind.itemsize * kind.itemsize].view(kind)
        places = starts[:, None] + (lasts[:, None] * _PLACES).long()
        bad = elements[places.clamp_(max=len(elements) - 1)].isnan().any(1)
        yield from map(columns.name, numbers[bad].tolist())


def _read_later(staged: StagedState, turn: int) -> Iterator[str]:
    """The names of tensors on the host that have NaN, of those whose turn it is.

    The program may have given their memory back by now, which is a torn save, or none. So the bytes come from the
    process's memory as a file, where an address that is not mapped is an error and no fault.
    """
    deferred = staged.deferred
    columns = deferred.columns
    every = -(-len(columns.locals) // _LATER) or 1
    with contextlib.suppress(OSError), open("/proc/self/mem", "rb", buffering=0) as memory:
        for at in range(turn % every, len(columns.locals), every):
            tensor = columns.locals[at]
            nbytes = tensor.itemsize
            elements = deferred.sizes[at] // nbytes
            if not (
                tensor.is_cpu and tensor.dtype in _KINDS and tensor.is_contiguous() and elements
            ):
                continue
            places = (0, elements // 2, elements - 1)
            words = bytearray().join(
                os.pread(memory.fileno(), nbytes, deferred.addresses[at] + place * nbytes)
                for place in places
            )
            if torch.frombuffer(words, dtype=tensor.dtype).isnan().any():
                yield columns.name(at)
