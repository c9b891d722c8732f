"""Which values of a source are taken, under which names, and with which dtype."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch

from dcp_datastates.conversion.source import Selected, Source
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.format.stored_names import (
    NO_NAMES,
    NamePatterns,
    Rename,
    check_rename,
    renamed,
)

_OPTIMIZER: Final = re.compile(r"(.+?)\.(?:param_groups(?=$|[.\[])|groups\..+\.[0-9a-f]{8}$)")
"""A name within the state of an optimizer, and the optimizer's."""

_SHORT: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True)
class Selection:
    """Checked options: see :func:`~dcp_datastates.conversion.convert.convert`."""

    only: NamePatterns | None = None
    exclude: NamePatterns = NO_NAMES
    part: str | None = None
    rename: Rename | None = None
    dtype: torch.dtype | None = None

    @property
    def chooses(self) -> bool:
        """Whether the user has named what is taken."""
        return self.only is not None or self.part is not None

    @property
    def takes_all(self) -> bool:
        """Whether all values are taken, as they are."""
        return not (self.chooses or self.exclude or self.rename or self.dtype)

    @staticmethod
    def checked(
        only: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = (),
        part: str | None = None,
        rename: Rename | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> Selection:
        """Raises :class:`ConfigurationError`, naming the first option that cannot work."""
        if part is not None and (not isinstance(part, str) or not part):
            raise ConfigurationError(f"part={part!r} must be a name, such as 'model'")
        if part is not None and only is not None:
            raise ConfigurationError(
                f"part={part!r} and only={only!r} both choose; part takes all below one name, and removes that name"
            )
        check_rename(rename)
        return Selection(
            None if only is None else NamePatterns("only", only),
            NamePatterns("exclude", exclude),
            part,
            rename,
            _dtype(dtype),
        )


def select(source: Source, selection: Selection) -> Source:
    """The values that ``selection`` takes from ``source``.

    Raises :class:`ConfigurationError` for names that collide, or if nothing is left;
    :class:`IncompatibleStateError`, listing similar names, for a key or an excluded name that fits nothing;
    :class:`UnsupportedTensorError` for a tensor that is taken and cannot be read.
    """
    taken = names = [*source.names(), *source.empty_dicts()]
    part = None if selection.part is None else NamePatterns("part", selection.part)
    if part is not None:
        taken = part.choose(names)
    elif selection.only is not None:
        taken = selection.only.choose(names)
    left_out = set(selection.exclude.choose(taken))
    taken = [name for name in taken if name not in left_out]
    if names and not taken:
        raise ConfigurationError(
            f"nothing is left of {source.path}: exclude={sorted(selection.exclude.given)} takes all out"
        )
    for name in taken:
        if name in source.refusals:
            raise source.refusals[name]
    old_of = renamed(taken, selection.rename, part=part, all_used=True)
    return Selected(source, old_of, selection.dtype)


def optimizers_in(source: Source) -> list[str]:
    """The names of the optimizers whose states are in ``source``."""
    found = filter(None, map(_OPTIMIZER.match, source.names()))
    return list(dict.fromkeys(each[1] for each in found))


def _dtype(dtype: Any) -> torch.dtype | None:
    if dtype is None:
        return None
    found = dtype
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        found = getattr(torch, _SHORT.get(name, name), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigurationError(
            f"dtype={dtype!r} is no floating-point dtype; give one such as 'bfloat16' or 'bf16'"
        )
    return found
