"""Which values of a source are taken, under which names, and with which dtype."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from dcp_datastates.conversion.source import Box, Source, shape_of
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.format.stored_names import (
    NO_NAMES,
    NamePatterns,
    Rename,
    check_rename,
    renamed,
    renamed_path,
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


class Selected(Source):
    """Values of another source, under other names."""

    def __init__(
        self, source: Source, old_of: Mapping[str, str], dtype: torch.dtype | None = None
    ) -> None:
        """``old_of``: the name in ``source`` of each value; ``dtype``: of floating-point tensors; None: as they are."""
        self.path, self.format = source.path, source.format
        self._source, self._old_of = source, old_of
        self.tensors = {
            name: _cast(source.tensors[old], dtype)
            for name, old in old_of.items()
            if old in source.tensors
        }
        self.objects = dict.fromkeys(name for name, old in old_of.items() if old in source.objects)
        self.paths = {
            name: renamed_path(source.paths.get(old, (old,)), old, name)
            for name, old in old_of.items()
        }
        casts = {
            (source.tensors[old_of[name]].dtype, each.dtype) for name, each in self.tensors.items()
        }
        for before, after in casts:
            if before != after:
                _check_cast(before, after)

    def read(self, wanted: Sequence[Box]) -> list[torch.Tensor]:
        """See :class:`Source`."""
        found = self._source.read([box._replace(name=self._old_of[box.name]) for box in wanted])
        return [
            each.to(self.tensors[box.name].dtype) for box, each in zip(wanted, found, strict=True)
        ]

    def object_bytes(self, name: str) -> bytes:
        """See :class:`Source`."""
        return self._source.object_bytes(self._old_of[name])


def _cast(shaped: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None or not shaped.dtype.is_floating_point:
        return shaped
    return shape_of(dtype, shaped.shape)


def _check_cast(old: torch.dtype, new: torch.dtype) -> None:
    try:
        torch.empty(1, dtype=new, device="cpu").copy_(torch.empty(1, dtype=old, device="cpu"))
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigurationError(
            f"dtype={new}: torch cannot convert {old} to it ({str(error).splitlines()[0]}); exclude such tensors"
        ) from error


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
