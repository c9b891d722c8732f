"""The names of stored values: which are meant, by prefixes and patterns, and what they are called elsewhere.

A stored name (FQN) is the path of a value in the saved state, joined by dots. A key is a name, or a prefix of names
that ends before a dot. A pattern is a key, or a key with ``*`` (any text, dots too) and ``?`` (one character). No
other character is special: the names of shards have brackets.
"""

from __future__ import annotations

import difflib
import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from dcp_datastates.errors import ConfigurationError, IncompatibleStateError
from dcp_datastates.format.key_paths import EMPTY, KeyPath, name_of

Box = tuple[tuple[int, int], ...]
"""The begin and end of a shard in each dimension."""

WRAPPER: Final = "__wrapper__"
"""The last part of the name under which the class of a wrapper subclass is stored, beside its inner tensors."""

_SHARD: Final = re.compile(r"\.\[((?:\d+:\d+,?)*)\]$")
_SHOWN: Final = 5


def shard_name(box: Box) -> str:
    """The name, below that of a DTensor around a wrapper subclass, of the shard at ``box``."""
    return f"[{','.join(f'{begin}:{end}' for begin, end in box)}]"


def wrappers(names: Iterable[str]) -> dict[str, dict[str, Box | None]]:
    """The names of the wrapper subclasses whose parts are among ``names``; for each, the prefix of the parts of each
    stored shard, and the shard's place: None if the wrapper was no DTensor.
    """
    found: dict[str, dict[str, Box | None]] = {}
    ending = f".{WRAPPER}"
    for name in filter(operator.methodcaller("endswith", ending), names):
        prefix = name.removesuffix(ending)
        shard = _SHARD.search(prefix)
        if shard is None:
            found.setdefault(prefix, {})[prefix] = None
        else:
            ends = [edge.split(":") for edge in shard[1].split(",") if edge]
            place = tuple((int(begin), int(end)) for begin, end in ends)
            found.setdefault(prefix[: shard.start()], {})[prefix] = place
    return found


def is_under(name: str, keys: frozenset[str]) -> bool:
    """Whether one of ``keys`` is ``name``, or a prefix of it that ends before a dot."""
    return bool(keys) and not keys.isdisjoint(prefixes_of(name))


def prefixes_of(name: str) -> Iterator[str]:
    """The prefixes of ``a.b.c`` are ``a``, ``a.b`` and itself."""
    place = name.find(".")
    while place >= 0:
        yield name[:place]
        place = name.find(".", place + 1)
    yield name


def near(names: list[str], key: str) -> str:
    """Which of ``names``, or of their prefixes, may have been meant by ``key``, in words."""
    keys = dict.fromkeys(prefix for name in names for prefix in prefixes_of(name))
    near = [known for known in keys if known.endswith(f".{key}")][:_SHOWN]
    near += difflib.get_close_matches(key, keys.keys() - near, _SHOWN - len(near) or 1)
    if near:
        return f"did you mean {' or '.join(map(repr, near[:_SHOWN]))}?"
    first = list(dict.fromkeys(next(prefixes_of(name)) for name in names))
    more = ", …" if len(first) > _SHOWN else ""
    return f"it has {', '.join(map(repr, first[:_SHOWN]))}{more}" if first else "it is empty"


# ---- patterns and renaming -----------------------------------------------------------------------


Rename = Mapping[str, str] | Callable[[str], str]
"""New prefixes by old ones, or new globs by old ones, of which the first that fits counts; or a function from a name to
a name.
"""

_SPECIAL: Final = re.compile(r"[*?]")


class NamePatterns:
    """A set of patterns.

    Args:
        option: the option that has them, for messages.
        given: one pattern or several. Raises :class:`ConfigurationError` for anything else.
    """

    def __init__(self, option: str, given: str | Iterable[str]) -> None:
        names = [given] if isinstance(given, str) else given
        names = list(names) if isinstance(names, Iterable) else [names]
        if not all(isinstance(each, str) for each in names):
            raise ConfigurationError(
                f"{option}={given!r} must be a name, or names, such as 'model'"
            )
        self.given: Final = frozenset(names)
        globs = sorted(each for each in self.given if _SPECIAL.search(each))
        self._plain = self.given.difference(globs)
        self._globs = {each: _regex(each) for each in globs}

    def __bool__(self) -> bool:
        return bool(self.given)

    def match(self, name: str) -> bool:
        """Whether a pattern fits ``name``, or a prefix of it that ends before a dot."""
        return bool(self) and not self.others([name])

    def others(self, names: Iterable[str]) -> list[str]:
        """The ``names`` that do not match, in their order."""
        rest = [name for name in names if not is_under(name, self._plain)]
        for glob in self._globs.values():
            rest = [name for name in rest if not _fits(glob, name)]
        return rest

    def without(self, name: str) -> str:
        """What is left of ``name`` after the shortest prefix that fits; ``name`` itself if that leaves nothing."""
        for prefix in sorted(prefixes_of(name), key=len):
            if prefix != name and self.match(prefix):
                return name[len(prefix) + 1 :]
        return name

    def choose(self, names: Iterable[str]) -> list[str]:
        """The ``names`` that match, in their order.

        Raises :class:`IncompatibleStateError`, listing similar names, for a pattern that fits none.
        """
        known = list(names)
        others = set(self.others(known))
        found = [name for name in known if name not in others]
        used = {prefix for name in found for prefix in prefixes_of(name)}
        unused = [each for each in self._plain if each not in used]
        unused += [
            each
            for each, glob in self._globs.items()
            if not any(_fits(glob, name) for name in found)
        ]
        if unused:
            key = min(unused)
            raise IncompatibleStateError(f"the checkpoint has no {key!r}; {near(known, key)}")
        return found


NO_NAMES: Final = NamePatterns("exclude", ())


def check_rename(rename: Rename | None) -> None:
    """Raise :class:`ConfigurationError` for what can rename nothing."""
    if isinstance(rename, Mapping):
        if not all(isinstance(each, str) for pair in rename.items() for each in pair):
            raise ConfigurationError(f"rename={rename!r} must map old prefixes to new ones")
        for old, new in rename.items():
            if new.count("*") != old.count("*"):
                raise ConfigurationError(
                    f"rename={{{old!r}: {new!r}}}: each * on the right has the text of the one at its place on the "
                    f"left, so there must be as many; give a function for more than that"
                )
    elif rename is not None and not callable(rename):
        raise ConfigurationError(
            f"rename={rename!r} must be a dict from old prefixes to new ones, or a function of a name"
        )


def new_name(name: str, rename: Rename | None) -> tuple[str, str | None]:
    """What ``name`` is called after ``rename``, and which of its entries was used.

    Raises :class:`ConfigurationError` if that is no name.
    """
    found, used = _renamed(name, rename) if isinstance(rename, Mapping) else (name, None)
    if callable(rename):
        found = rename(name)
    if not isinstance(found, str) or not found:
        raise ConfigurationError(f"rename gives {name!r} the name {found!r}, which names nothing")
    return found, used


def _renamed(name: str, rename: Mapping[str, str]) -> tuple[str, str | None]:
    for old, new in rename.items():
        if "*" not in old:
            if name.startswith(old):
                return new + name.removeprefix(old), old
        elif (fit := _prefix_regex(old).match(name)) is not None:
            first, *pieces = new.split("*")
            filled = "".join(
                text + piece for text, piece in zip(fit.groups(), pieces, strict=False)
            )
            return first + filled + name[fit.end() :], old
    return name, None


def renamed(
    names: Iterable[str],
    rename: Rename | None,
    *,
    part: NamePatterns | None = None,
    all_used: bool = False,
) -> dict[str, str]:
    """The old name by the new. First what fits ``part`` and a dot are removed from the beginning of names.

    Raises :class:`ConfigurationError` if two names become one; with ``all_used``, also for an entry of ``rename`` that
    fits no name.
    """
    known = list(names)
    used: set[str | None] = set()
    old_of: dict[str, str] = {}
    for old in known:
        short = old if part is None else part.without(old)
        name, entry = new_name(short, rename)
        used.add(entry)
        if name in old_of:
            raise ConfigurationError(
                f"{old_of[name]!r} and {old!r} would both have the name {name!r}; rename them apart, or exclude one"
            )
        old_of[name] = old
    if all_used and isinstance(rename, Mapping):
        for each in rename:
            if each not in used:
                raise ConfigurationError(
                    f"rename={each!r}: no name begins so; they are such as {known[:3]}"
                )
    return old_of


def renamed_path(path: KeyPath, old: str, new: str) -> KeyPath:
    """The path of ``old`` for a value called ``new``: with the longest end that is still the end of the name."""
    if old == new:
        return path
    for place in range(len(path) - (path[-1] == EMPTY)):
        tail = name_of(path[place:])
        if new == tail:
            head: KeyPath = ()
        elif new.endswith(f".{tail}"):
            head = (new.removesuffix(f".{tail}"),)
        else:
            continue
        if head or not isinstance(path[place], int):  # a state is no list
            return (*head, *path[place:])
    return (new, EMPTY) if path[-1] == EMPTY else (new,)


def _fits(glob: re.Pattern[str], name: str) -> bool:
    return any(glob.match(prefix) for prefix in prefixes_of(name))


def _regex(glob: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(glob.replace("[", "[[]")))


def _prefix_regex(glob: str) -> re.Pattern[str]:
    return re.compile("(.*?)".join(map(re.escape, glob.split("*"))), re.DOTALL)
