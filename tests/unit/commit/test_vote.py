"""What ranks tell each other in a round: votes, reasons, decisions; and what the store keeps of it."""

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from dcp_datastates.commit.vote import (
    Decision,
    DecisionLog,
    Outcome,
    Reason,
    decode_vote,
    encode_vote,
)
from dcp_datastates.errors import (
    CommitOutcomeUnknown,
    SaveFailedError,
    SnapshotTornError,
    StorageError,
)
from dcp_datastates.storage.attempt import Attempt

SAVE = {
    "number": 7,
    "attempt": Attempt(2**60 + 3, 12),
    "directory": Path("/a/step-5"),
    "world": 4,
}


def _same(change, **other):
    """Whether votes for saves that differ so count as votes for the same one."""
    digests = [decode_vote(encode_vote(**{**SAVE, **each}))[0] for each in (change, other)]
    return len(set(digests)) == 1


@pytest.mark.parametrize("report", [b"", b"\0\1", encode_vote(**SAVE), b"x" * 100_000])
@pytest.mark.parametrize("trace", [b"", b"t" * 255])
def test_reports_and_traces_come_whatever_bytes_they_have(report, trace):
    digest, *found = decode_vote(encode_vote(**SAVE, report=report, trace=trace))
    assert found == [report, trace]
    assert digest == decode_vote(encode_vote(**SAVE))[0]


@pytest.mark.parametrize(
    "change",
    [
        {"number": 8},
        {"attempt": Attempt(2**60 + 3, 13)},
        {"attempt": Attempt(2**60 + 2, 12)},
        {"attempt": None},
        {"directory": Path("/a/step-6")},
        {"world": 3},
    ],
)
def test_votes_for_different_saves_do_not_agree(change):
    assert not _same(change)


def test_a_directory_may_be_mounted_elsewhere_on_another_machine():
    assert _same({"directory": Path("/mnt/b/step-5")})


def test_a_directory_may_have_a_name_that_is_not_text():
    odd = {"directory": Path(os.fsdecode(b"/a/\xff"))}
    assert _same(odd, **odd)
    assert not _same(odd)


def test_a_reason_may_name_a_file_whose_name_is_not_text_and_is_cut():
    reason = Reason.of(OSError(os.fsdecode(b"/a/\xff") + "x" * 5000))
    assert reason.message.startswith(r"/a/\udcffxxx")
    assert len(json.dumps(reason.message)) < 1000


@pytest.mark.parametrize("outcome", list(Outcome))
def test_decisions_come_back(outcome):
    decision = Decision(outcome, {3: Reason("StorageError", 'x "y"')}, given_up=True, more=4)
    assert Decision.decode(decision.encode().encode()) == decision


def test_the_error_has_the_causes_type_and_names_rank_and_path():
    decision = Decision.failed(3, SnapshotTornError("'w' changed"))
    error = decision.error("'/c'", 4)
    assert type(error) is SnapshotTornError
    assert str(error) == "the save to '/c' failed: rank 3 of 4: 'w' changed"


def test_errors_of_others_are_named_but_not_raised_as_they_are():
    error = Decision.failed(1, RuntimeError("boom")).error("'/c'", 2)
    assert type(error) is SaveFailedError
    assert "rank 1 of 2: RuntimeError: boom" in str(error)


def test_different_causes_are_all_said_up_to_a_few():
    reasons = {rank: Reason.of(StorageError(28, f"disk {rank}")) for rank in range(5)}
    reasons[1] = Reason.of(SnapshotTornError("torn"))
    error = Decision(Outcome.FAILED, reasons, more=5).error("'/c'", 8)
    assert type(error) is SaveFailedError
    for word in ("rank 0", "rank 1", "rank 2", "7 more"):
        assert word in str(error)


def test_an_unknown_outcome_says_so():
    error = Decision(Outcome.UNKNOWN, {-1: Reason("x", "who knows")}).error("'/c'", 2)
    assert type(error) is CommitOutcomeUnknown


# ---- in the store --------------------------------------------------------------------------------

FAILED = Decision(Outcome.FAILED, given_up=True)
COMMITTED = Decision(Outcome.COMMITTED)


class _Failing:
    """A store that fails while ``down``."""

    def __init__(self):
        self.store = dist.HashStore()
        self.down = False

    def __getattr__(self, name):
        if self.down:
            raise RuntimeError("Connection reset by peer")
        return getattr(self.store, name)


def test_what_the_coordinator_notes_all_ranks_find():
    store = dist.HashStore()
    coordinator, other = DecisionLog(store), DecisionLog(store)
    assert other.find(7) is None
    coordinator.note(7, FAILED)
    assert other.find(7) == FAILED
    assert other.find(8) is None


def test_what_could_not_be_noted_is_noted_later():
    store = _Failing()
    log = DecisionLog(store)
    store.down = True
    with pytest.raises(RuntimeError):
        log.note(7, COMMITTED)
    store.down = False
    assert log.find(7) is None
    log.flush()
    assert log.find(7) == COMMITTED


def test_old_keys_are_dropped_and_only_those():
    store = dist.HashStore()
    kept = DecisionLog(store)
    for number in range(200):
        kept.note(number, FAILED)
        kept.forget_before(number)
    found = [number for number in range(200) if kept.find(number) is not None]
    assert found == list(range(200 - len(found), 200))
    assert 10 <= len(found) <= 100
