"""Which stored values go into which values of a state, and what a load does about the others: what the user chose.

:class:`~dcp_datastates.loading.fitting.Fitting` applies it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypedDict, get_args

from dcp_datastates.config import check_options, parse_flag
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.format.stored_names import (
    NO_NAMES,
    NamePatterns,
    Rename,
    check_rename,
    renamed,
)

Answer = Literal["error", "warn", "ignore"]


class FitOptions(TypedDict, total=False):
    """What a load takes from a checkpoint, and what it does if the state does not fit.

    ``rename`` is applied first, so all other options take names of the program's state.
    """

    exclude: str | Iterable[str]
    """Leave the values under these names as they are."""
    rename: Rename | None
    """The program's name for a stored name: a dict from old prefixes to new ones (``{"net.": "model."}``), or from
    old globs to new ones (``{"*.attn.*": "*.attention.*"}``), or a function. The first entry that fits counts.
    """
    missing: Answer
    """What to do if the state has values that the checkpoint lacks: ``"error"`` (the default); ``"warn"``: they stay as
    they are, and a line in the log has their names; ``"ignore"``: they stay as they are.
    """
    unexpected: Answer
    """What to do if the checkpoint has values that no rank's state has: ``"error"``; ``"warn"`` (the default): they
    stay unread, and a line in the log has their names; ``"ignore"``: they stay unread.
    """
    cast: bool
    """Whether a tensor may be loaded into a tensor of another dtype. Stock DCP casts silently; here the default is to
    refuse.
    """
    allow_objects: bool
    """Whether Python objects may be unpickled that need more than safe types, and may run code; only for checkpoints
    that you trust. The default is to refuse them by name, before anything changes.
    """


class LoadOptions(FitOptions, total=False):
    """The options of a restore: :class:`FitOptions` and two more."""

    only: str | Iterable[str] | None
    """Load only the values under these names: full names, prefixes that end before a dot (``"model"``,
    ``"model.layers.0"``), or either with ``*`` and ``?``. None: all.
    """
    share_reads: bool | None
    """As for :class:`~dcp_datastates.DataStatesReader`."""


@dataclass(frozen=True)
class Fit:
    """Checked :class:`FitOptions`, and ``only``."""

    only: NamePatterns | None = None
    exclude: NamePatterns = NO_NAMES
    rename: Rename | None = None
    missing: Answer = "error"
    unexpected: Answer = "warn"
    cast: bool = False
    allow_objects: bool = False

    @staticmethod
    def of_restore(options: LoadOptions) -> Fit:
        """:meth:`of`, of the options of a restore. Raises as :meth:`of`, also for a name that is none of them."""
        check_options("restore", options, LoadOptions)
        return Fit.of(options, options.get("only"))

    @staticmethod
    def of(options: FitOptions, only: str | Iterable[str] | None = None) -> Fit:
        """The options, checked.

        Raises :class:`ConfigurationError`, naming the first that cannot work.
        """
        fit = Fit(
            None if only is None else NamePatterns("only", only),
            NamePatterns("exclude", options.get("exclude", ())),
            options.get("rename"),
            options.get("missing", "error"),
            options.get("unexpected", "warn"),
            options.get("cast", False),
            options.get("allow_objects", False),
        )
        check_rename(fit.rename)
        for name, answer in (("missing", fit.missing), ("unexpected", fit.unexpected)):
            if answer not in get_args(Answer):
                raise ConfigurationError(f'{name}={answer!r} must be "error", "warn" or "ignore"')
        parse_flag("cast", fit.cast)
        parse_flag("allow_objects", fit.allow_objects)
        return fit

    def without(self, names: Collection[str]) -> Fit:
        """This, which also leaves out what lies under ``names``."""
        return replace(self, exclude=NamePatterns("exclude", {*self.exclude.given, *names}))

    def takes(self, name: str) -> bool:
        """Whether the value of the state with this name is to be loaded."""
        return (self.only is None or self.only.match(name)) and not self.exclude.match(name)

    @property
    def takes_all(self) -> bool:
        """Whether all values of the state are to be loaded."""
        return self.only is None and not self.exclude

    def names(self, stored: Iterable[str]) -> dict[str, str]:
        """The stored names to load, by the program's.

        Raises :class:`ConfigurationError` if two become one; :class:`IncompatibleStateError` for a name in ``only``
        that is not stored.
        """
        names = renamed(stored, self.rename) if self.rename else {name: name for name in stored}
        if self.only is not None:
            chosen = self.only.choose(names)
            names = {name: names[name] for name in chosen}
        if self.exclude:
            names = {name: names[name] for name in self.exclude.others(names)}
        return names
