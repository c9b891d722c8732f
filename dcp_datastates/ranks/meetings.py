"""Meetings of the ranks at the job's store: each rank leaves a message, and the first rank answers all.

A meeting has a number, which each rank counts by itself, and these keys:

- ``<number>/<rank>``: the rank's message. The first rank reads all of them.
- ``<number>/answer``: the *word*, written once: the first one counts. Either the first rank has answered ("go"), and
  then this key has the answer if it is the same for all; or a rank has given the meeting up ("stop"), and why.
- ``<number>/answer/<rank>``: a rank's own answer, where answers differ.

**No two ranks pair different meetings**, because the numbers are in the keys. **All ranks learn the same**: a rank that
wants to leave a meeting writes "stop", and if "go" is there already, it takes the answer. A rank that comes late finds
the word in place of the other ranks.

**No rank waits forever**: each calls its ``check`` repeatedly while it waits, which may raise. A request that the store
does not answer is repeated, as long as ``check`` allows. A "stop" that cannot be written is written before the next
meeting.

A meeting costs each rank four requests, and those that ask whether the answer is there.
"""

from __future__ import annotations

import functools
import json
import logging
import struct
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from dcp_datastates.config import MAX_IN_FLIGHT
from dcp_datastates.ranks.connection import pauses
from dcp_datastates.ranks.rank_set import RankSet

logger = logging.getLogger(__name__)

T = TypeVar("T")

Check = Callable[[], None]

_STORE_PAUSE: Final = 0.2
"""Time before a request that has failed is repeated, in seconds."""

_KNOWN_PAUSE: Final = 0.05
"""Longest time between two calls of ``check`` while this rank has not met rank 0, in seconds."""

_KEPT: Final = 2 * MAX_IN_FLIGHT
"""How many meetings' words stay in the store. A rank is at most as many saves late as may be in flight."""

_FIRST_PIECE: Final = 4 << 10
_PIECE: Final = 128 << 10
"""Sizes (bytes) of the pieces of a value. torch's store takes none of more than 8 MiB, and is fastest with these: it
moves 130 MB/s. One request for many values must be for few bytes: 64 of 4 KiB take 5 ms, 64 of 64 KiB take 1.6 s.
"""

_MANY: Final = 64
"""How many keys one request names: the store reads a long one again and again, until all of it has come."""

_HEAD: Final = struct.Struct("<QQ")
"""Precedes a value: how many bytes it has, and how many the compressed ones are that the store holds. (A first plan is
names and numbers, and shrinks to a tenth.) If that is no fewer, they are stored as they are.
"""

_FOR_ALL: Final = b"go\0"
_FOR_EACH: Final = b"go\1"


class GivenUp(Exception):
    """A rank has given the meeting up.

    Attributes:
        name: what it had come for; empty if that is not known.
        kind: the name of the type of the error that made it do so.
        why: what that says.
        early: whether it did so before this rank came.
    """

    def __init__(self, name: str, kind: str, why: str) -> None:
        super().__init__(why)
        self.name: Final = name
        self.kind: Final = kind
        self.why: Final = why
        self.early = False


@dataclass(frozen=True)
class Met:
    """What came of a meeting."""

    answer: bytes
    """The first rank's, for this rank."""
    error: BaseException | None = None
    """Why this rank wanted to give the meeting up. It was too late: the first rank had answered."""


def poll(is_there: Callable[[], bool], check: Check, world: int) -> None:
    """Return when ``is_there()``; call ``check`` in between, which may raise. Of ``world`` ranks, many may wait at the
    same time.
    """
    pause = pauses(world)
    while not is_there():
        check()
        time.sleep(next(pause))


class Meetings:
    """This rank's side of the meetings of one ``kind``. One thread at a time uses it. Rank 0 is the first rank.

    The n-th object of a kind belongs to the n-th one of each other rank.
    """

    def __init__(self, rank_set: RankSet, kind: str) -> None:
        self.name: Final = f"{kind}/{rank_set.incarnation.count(kind)}"
        """The prefix of the keys."""
        self._rank_set = rank_set
        self._store = rank_set.connect(self.name)
        # Of the present meeting: what this rank calls while it waits, and whether it has waited for others.
        self._check: Check = _fail
        self._waits = False
        # On the first rank: the keys of the messages that it waits for, by rank.
        self._awaited: dict[int, str] = {}
        self._unsaid: dict[int, str] = {}  # by meeting
        # The keys that this rank deletes at the end of a meeting, or when no rank can come to it any more. On the first
        # rank the word's is the first, which is deleted then only.
        self._spent: dict[int, list[str]] = {}

    def meet(
        self,
        number: int,
        message: bytes,
        answer: Callable[[Sequence[bytes]], Sequence[bytes]],
        check: Check,
        name: str = "",
    ) -> Met:
        """Meet the other ranks for the ``number``, leave a ``message``, and return the first rank's answer.

        Args:
            answer: On the first rank: makes the answers of all ranks from their messages, in the order of ranks.
            check: Called repeatedly while this rank waits. If it raises, the rank gives the meeting up.
            name: What this rank comes for. It tells ranks that come for something else, and find the meeting given up.

        Raises :class:`GivenUp` if another rank has given the meeting up; and what ``check`` and ``answer`` raise.
        """
        self._check, self._waits = check, False
        try:
            while not self._rank_set.incarnation.await_known(_KNOWN_PAUSE):
                check()
            self._say_unsaid()
            self._note(number)
            if self._rank_set.rank == 0:
                self._lead(number, message, answer)
            else:
                mine = {_message(number, self._rank_set.rank): message}
                self._ask(lambda: self._put(number, mine))
            met = Met(self._hear(number))
        except GivenUp as stop:
            stop.early = not self._waits
            raise
        except BaseException as error:
            if (late := self._leave(number, name, error)) is None:
                raise
            met = late
        finally:
            self._check = _fail  # release what it refers to
        first = 1 if self._rank_set.rank == 0 else 0  # late ranks look for the word
        self._delete(self._spent[number][first:])
        del self._spent[number][first:]
        return met

    def give_up(self, number: int, error: BaseException, name: str = "") -> bool:
        """Say that this rank does not come to a meeting, or leaves it, because of ``error``; the first one counts.
        Returns whether rank 0 has answered.
        """
        self._note(number)
        while len(self._unsaid) >= _KEPT:
            del self._unsaid[next(iter(self._unsaid))]
        kind = type(error).__name__
        self._unsaid.setdefault(number, json.dumps([name, kind, str(error) or kind]))
        return self._say_unsaid() == number

    def absent(self) -> list[int]:
        """On the first rank, for a ``check``: some of the ranks whose messages are not there. Raises RuntimeError."""
        return [rank for rank, key in self._awaited.items() if not self._store.check([key])]

    # ---- the first rank ------------------------------------------------------------------------------

    def _lead(
        self, number: int, message: bytes, answer: Callable[[Sequence[bytes]], Sequence[bytes]]
    ) -> None:
        messages = [message]
        for at in range(1, self._rank_set.world, _MANY):
            others = range(at, min(at + _MANY, self._rank_set.world))
            self._awaited = {rank: _message(number, rank) for rank in others}
            some = list(self._awaited.values())
            self._await(functools.partial(self._are_there, some, number))
            found = self._ask(functools.partial(self._get, some))
            messages += [value for value, _ in found]
        self._awaited = {}
        answers = answer(messages)
        word = _FOR_ALL + answers[0]
        if len(set(answers)) > 1 or len(word) > _FIRST_PIECE:
            word = _FOR_EACH
            own = {_own(number, rank): each for rank, each in enumerate(answers)}
            self._ask(lambda: self._put(number, own))
        if self._ask(lambda: self._store.compare_set(_word(number), "", word)) == word:
            del self._spent[number][1:]  # each rank deletes its answer

    def _are_there(self, keys: Sequence[str], number: int) -> bool:
        """Whether all ``keys`` are there. Raises :class:`GivenUp` if not, and a rank has given the meeting up."""
        if self._store.check(keys):
            return True
        if self._store.check([_word(number)]):
            _heed(self._store.get(_word(number)))
        return False

    # ---- all -----------------------------------------------------------------------------------------

    def _hear(self, number: int) -> bytes:
        self._await(lambda: self._store.check([_word(number)]))
        word = _heed(self._ask(lambda: self._store.get(_word(number))))
        if not word.startswith(_FOR_EACH):
            return word[len(_FOR_ALL) :]
        key = _own(number, self._rank_set.rank)
        ((answer, pieces),) = self._ask(lambda: self._get([key]))
        self._spent[number] += pieces
        return answer

    def _leave(self, number: int, name: str, error: BaseException) -> Met | None:
        """Give the meeting up. If it is too late for that, returns what came of it."""
        if not self.give_up(number, error, name):
            return None
        self._check = _fail
        try:
            return Met(self._hear(number), error)
        except (RuntimeError, GivenUp):
            return None

    def _say_unsaid(self) -> int | None:
        """Write what could not be written before; returns the newest meeting in which the first rank has answered."""
        answered = None
        try:
            while self._unsaid and self._rank_set.incarnation.await_known(0.0):
                number, stop = next(iter(self._unsaid.items()))
                word = self._store.compare_set(_word(number), "", stop)
                del self._unsaid[number]
                if word.startswith((_FOR_ALL, _FOR_EACH)):
                    answered = number
        except RuntimeError as error:
            logger.info("the ranks' store fails: %s", error)
        return answered

    def _ask(self, request: Callable[[], T]) -> T:
        """What ``request`` returns. Repeats it while the store fails, as long as the check allows."""
        while True:
            try:
                return request()
            except RuntimeError as error:
                logger.info("the ranks' store fails: %s", error)
            self._check()
            time.sleep(_STORE_PAUSE)

    def _await(self, is_there: Callable[[], bool]) -> None:
        def waiting() -> None:
            self._waits = True
            self._check()

        poll(lambda: self._ask(is_there), waiting, self._rank_set.world)

    def _note(self, number: int) -> None:
        """This rank has keys of the meeting ``number``. Delete those of an old one, which was given up."""
        if number not in self._spent:
            self._spent[number] = [_word(number)] if self._rank_set.rank == 0 else []
        while len(self._spent) > _KEPT:
            self._delete(self._spent.pop(next(iter(self._spent))))

    def _delete(self, keys: Sequence[str]) -> None:
        try:
            for key in keys:
                self._store.delete_key(key)
        except RuntimeError as error:
            logger.info("keys of a meeting stay in the ranks' store: %s", error)

    # ---- values of any length ------------------------------------------------------------------------

    def _put(self, number: int, values: Mapping[str, bytes]) -> None:
        """Write the ``values`` of a meeting. The first piece of each is written last: then the others are there."""
        batch: dict[str, bytes] = {}
        for name, value in values.items():
            stored = zlib.compress(value, 1) if len(value) > _FIRST_PIECE else value
            stored = min(stored, value, key=len)
            keys = _pieces(name, len(stored))
            self._spent[number] += keys
            for key, at in zip(keys[1:], range(_FIRST_PIECE, len(stored), _PIECE), strict=True):
                self._store.set(key, stored[at : at + _PIECE])
            batch[name] = _HEAD.pack(len(value), len(stored)) + stored[:_FIRST_PIECE]
            if len(batch) == _MANY:
                self._store.multi_set(batch)
                batch = {}
        if batch:
            self._store.multi_set(batch)

    def _get(self, names: Sequence[str]) -> list[tuple[bytes, list[str]]]:
        """The values under the ``names``, and the keys of their pieces."""
        found = []
        for name, first in zip(names, self._store.multi_get(names), strict=True):
            nbytes, in_store = _HEAD.unpack_from(first)
            keys = _pieces(name, in_store)
            stored = b"".join([first[_HEAD.size :], *map(self._store.get, keys[1:])])
            is_plain = in_store == nbytes
            value = stored if is_plain else zlib.decompressobj().decompress(stored, nbytes)
            found.append((value, keys))
        return found


def _fail() -> None:
    raise RuntimeError("the ranks' store fails")


def _heed(word: bytes) -> bytes:
    """The ``word`` itself; raises :class:`GivenUp` if it is a rank's that has given the meeting up."""
    if not word.startswith((_FOR_ALL, _FOR_EACH)):
        raise GivenUp(*json.loads(word))
    return word


def _message(number: int, rank: int) -> str:
    return f"{number}/{rank}"


def _word(number: int) -> str:
    return f"{number}/answer"


def _own(number: int, rank: int) -> str:
    return f"{number}/answer/{rank}"


def _pieces(name: str, nbytes: int) -> list[str]:
    """The keys of the pieces of a value."""
    return [name, *(f"{name}/{at}" for at in range(_FIRST_PIECE, nbytes, _PIECE))]
