"""Steps that all ranks do together: each is done on all of them, or fails on all of them with one error.

Each rank does its part, and brings a note to a meeting (:mod:`dcp_datastates.ranks.meetings`), or why it has failed.
The first rank then answers all notes; what it does for that completes the step. If a part or the answer has failed, all
ranks are told on which ranks, and why. An interrupt is raised on its own rank only; the others are told of an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dcp_datastates.commit.vote import Decision, Outcome, Reason
from dcp_datastates.ranks.meetings import GivenUp, Met

Answer = Callable[[Sequence[bytes]], Sequence[bytes]]
"""On the first rank: makes the answers to all ranks from their notes, in the order of ranks."""

Meet = Callable[[bytes, Answer], Met]
"""Meets the other ranks with a message, as :meth:`Meetings.meet`."""

_DONE: Final = b"+"
_FAILED: Final = b"-"
"""With which a message or an answer begins."""

_TOLD: Final = 8
"""How many ranks' reasons all ranks are told."""


@dataclass(frozen=True)
class StepEnd:
    """How a step has ended, on all ranks.

    Attributes:
        answer: the first rank's, for this rank.
        late: why this rank wanted to leave the meeting. It was too late: the first rank had answered.
        failed: why the step has failed, on the first few ranks, or (-1) why one has given the meeting up; None if it is
            done.
        own: this rank's own error.
    """

    answer: bytes = b""
    late: BaseException | None = None
    failed: Decision | None = None
    own: BaseException | None = None

    def error(self, where: str) -> BaseException | None:
        """The one error, of the first rank that has failed; None if the step is done. ``where``: see
        :meth:`Reason.error`.
        """
        if self.failed is None:
            return None
        first, why = min(self.failed.reasons.items())
        if self.own is not None and (first < 0 or Reason.of(self.own, whole=True) == why):
            return self.own
        error = why.error(where)
        error.__cause__ = self.own
        return error


def alone(message: bytes, answer: Answer) -> Met:
    """The meeting of a rank that has no others."""
    return Met(answer([message])[0])


def together(
    meet: Meet, work: Callable[[], bytes | Reason], answer: Answer, *, whole: bool = False
) -> StepEnd:
    """Do a step with all ranks: ``work`` on each, which returns its note, or why it has failed; then ``answer`` on the
    first. ``whole``: whether errors are told with their arguments and attributes, which may be long, for
    :meth:`StepEnd.error`.

    Raises this rank's own interrupt; and what ends this rank's wait in ``meet``, with this rank's own error as its
    cause.
    """
    own: BaseException | None = None

    def answers(messages: Sequence[bytes]) -> Sequence[bytes]:
        nonlocal own
        failed = {rank: each for rank, each in enumerate(messages) if each.startswith(_FAILED)}
        reasons = {rank: _failed(each).reasons[0] for rank, each in failed.items()}
        try:
            if not reasons:
                return [_DONE + each for each in answer([each[1:] for each in messages])]
        except BaseException as error:  # the other ranks wait for an answer
            own, reasons = error, {0: Reason.of(error, whole)}
        return [_refusal(reasons)] * len(messages)

    try:
        try:
            note = work()
            message = _refusal({0: note}) if isinstance(note, Reason) else _DONE + note
        except BaseException as error:  # the other ranks wait for it
            own, message = error, _refusal({0: Reason.of(error, whole)})
        try:
            met = meet(message, answers)
            if met.answer.startswith(_DONE):
                return StepEnd(met.answer[1:], met.error)
            return StepEnd(b"", met.error, _failed(met.answer), own)
        except GivenUp as stop:
            given_up = Reason(stop.kind, stop.why)
            return StepEnd(failed=Decision(Outcome.FAILED, {-1: given_up}), own=own)
        except Exception as left:
            left.__cause__ = own or left.__cause__
            raise
        finally:
            if own is not None and not isinstance(own, Exception):
                raise own from own.__cause__  # an interrupt comes before all that came of it
    finally:
        del own  # its traceback retains this frame


def _refusal(reasons: Mapping[int, Reason]) -> bytes:
    """Of the first few ranks; the parts, which may be long, of the first one only."""
    first, told = min(reasons), sorted(reasons)[:_TOLD]
    brief = {rank: replace(reasons[rank], parts=None) for rank in told}
    failed = Decision(
        Outcome.FAILED, {**brief, first: reasons[first]}, more=len(reasons) - len(told)
    )
    return _FAILED + failed.encode().encode()


def _failed(message: bytes) -> Decision:
    return Decision.decode(message[1:])
