"""What a staged state dict looks like, its values aside: equal fingerprints, equal plans.

Made by the traversal that stages a state, a few passes of C over all tensors, and compared the same way: nothing
here costs a Python loop over tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from dcp_datastates.format.fields import pack_value

__all__ = ["Fingerprint", "fingerprint"]

_DTYPE: Final = operator.attrgetter("dtype")
_REQUIRES_GRAD: Final = operator.attrgetter("requires_grad")
_SHAPE: Final = operator.attrgetter("shape")
_SPEC: Final = operator.attrgetter("_spec")


class Fingerprint:
    """Hashable. Holds no tensor.

    Args:
        structure: keys, and types of the values, of every container in the order of the traversal.
        forms: shape, dtype, and so on, of the tensors in that order.
        specs: mesh, placements and global shape of those that are DTensors. Compared, not hashed: that takes
            longer, unless they are the very same objects, as they are from one save to the next.
    """

    __slots__ = ("_forms", "_hash", "_specs", "_structure")

    def __init__(
        self, structure: tuple[Any, ...], forms: tuple[Any, ...], specs: tuple[Any, ...]
    ) -> None:
        self._structure = structure
        self._forms = forms
        self._specs = specs
        self._hash = hash((structure, forms, len(specs)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Fingerprint)
            and self._hash == other._hash
            and self._structure == other._structure
            and self._forms == other._forms
            and self._specs == other._specs
        )


def fingerprint(
    structure: Iterable[Any],
    tensors: Sequence[torch.Tensor],
    locals_: Sequence[torch.Tensor],
    further: Sequence[tuple[Any, ...]],
) -> Fingerprint | None:
    """The fingerprint of a state with these leaves, in the order of the traversal. All are plain and on the host.

    ``further``: values of fields of ``TensorProperties`` that this package does not know. None if they cannot be
    compared.
    """
    said: Any = tuple(further)
    try:
        hash(said)
    except TypeError:
        try:
            said = pack_value(said)
        except Exception:  # pickle has many ways to refuse
            return None
    forms = (
        tuple(map(_SHAPE, locals_)),
        tuple(map(_DTYPE, locals_)),
        tuple(map(_REQUIRES_GRAD, tensors)),  # a DTensor's own: its local tensor has another
        said,
    )
    specs = tuple(map(_SPEC, (each for each in tensors if type(each) is DTensor)))
    return Fingerprint(tuple(structure), forms, specs)
