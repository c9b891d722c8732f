"""Which stored names a load of optimizers takes: they follow a rename of their model, and none is lost in silence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from dcp_datastates.format.stored_names import new_name, prefixes_of, renamed
from dcp_datastates.loading.fit import Fit
from dcp_datastates.manager.optimizers import OptimizerPart

_GROUP: Final = re.compile(r"(.+?)\.groups\..+\.[0-9a-f]{8}")
"""The name of a group, which begins with that of its optimizer."""


def load_options(
    fit: Fit, stored: Iterable[str], optimizers: Iterable[OptimizerPart]
) -> tuple[Fit, dict[str, str]]:
    """Prepare optimizers for a load: returns ``fit``, whose ``rename`` of a model renames the parameters of its
    optimizer, too; and the stored names that some rank must take, so that no state is lost in silence, each with the
    name of its optimizer. That may be one that this rank does not have.
    """
    stored = list(stored)
    for each in optimizers:
        each.fit, each.renamed = fit, None
        fit = _following(fit, stored, each)
    needed: dict[str, str] = {}
    names = fit.names(stored)
    for each in optimizers:
        each.fit = fit
    for optimizer in {each.name for each in optimizers} | _optimizers_among(names):
        below = tuple(f"{optimizer}.{section}." for section in ("state", "params", "groups"))
        needed.update({old: optimizer for name, old in names.items() if name.startswith(below)})
    return fit, needed


def _optimizers_among(names: Iterable[str]) -> set[str]:
    """The names of the optimizers that have a group among these names."""
    return {found[1] for name in names if (found := _GROUP.fullmatch(name))}


def _following(fit: Fit, stored: Sequence[str], part: OptimizerPart) -> Fit:
    given = fit.rename
    if given is None:
        return fit
    of_models = renamed(stored, given)
    live, start = part.live(), f"{part.name}.state."
    by_old: dict[str, str] = {}
    for name, full in sorted(live.in_model.items(), key=lambda each: each[1].count(".")):
        for place, letter in enumerate(old := f".{of_models.get(full, full)}"):
            if letter == ".":
                by_old.setdefault(old[place + 1 :], name)

    def rename(old: str) -> str:
        name, _ = new_name(old, given)
        if not name.startswith(start) or not old.endswith(name[len(part.name) :]):
            return name  # it is renamed by itself
        rest = name.removeprefix(start)
        for prefix in sorted(prefixes_of(rest), key=len, reverse=True):
            if prefix in by_old:
                return start + by_old[prefix] + rest.removeprefix(prefix)
        return name

    optimizers = [old for old in stored if new_name(old, given)[0].startswith(start)]
    if optimizers:
        old = optimizers[0]
        before = old[: old.rindex(".state.") + len(".state.")]
        part.renamed = lambda name: rename(f"{before}{name}.").removeprefix(start).removesuffix(".")
    return replace(fit, rename=rename)
