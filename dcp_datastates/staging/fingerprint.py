"""The fingerprint of a staged state: its structure without values. Equal fingerprints mean equal plans.

The columns of the traversal give the fingerprint in a few C-level passes over all tensors, and comparing works alike:
no Python loop over tensors.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

__all__ = ["Fingerprint", "fingerprint"]

_DTYPE: Final = operator.attrgetter("dtype")
_REQUIRES_GRAD: Final = operator.attrgetter("requires_grad")
_SHAPE: Final = operator.attrgetter("shape")
_SPEC: Final = operator.attrgetter("_spec")


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of a state. Hashable; holds no tensor."""

    structure: tuple[Any, ...]
    """The keys of every container and the types of its values, in the order of the traversal."""
    forms: tuple[Any, ...]
    """Shape, dtype, and so on, of the tensors, in the same order."""
    specs: tuple[Any, ...]
    """Mesh, placements and global shape of the DTensors. They are compared, not hashed: hashing takes longer, while
    comparing is fast for identical objects, which they usually are from save to save.
    """

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.structure, self.forms, len(self.specs)))


def fingerprint(
    structure: Iterable[Any],
    tensors: Sequence[torch.Tensor],
    locals_: Sequence[torch.Tensor],
    strides: Sequence[tuple[int, ...]],
) -> Fingerprint:
    """The fingerprint of a state with these leaves, in the order of the traversal. All tensors are plain, and the
    engine can read their memory. ``strides``: of each tensor, if plans have them.
    """
    forms = (
        tuple(map(_SHAPE, locals_)),
        tuple(map(_DTYPE, locals_)),
        tuple(map(_REQUIRES_GRAD, tensors)),  # the DTensor's flag: its local tensor's may differ
        tuple(strides),
    )
    specs = tuple(map(_SPEC, (each for each in tensors if type(each) is DTensor)))
    return Fingerprint(tuple(structure), forms, specs)
