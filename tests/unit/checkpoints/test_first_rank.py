"""One rank looks, and all know; here without other ranks."""

import pickle

import pytest
from support.state.checkpoints import Malice, raises

from dcp_datastates.checkpoints import first_rank
from dcp_datastates.checkpoints.first_rank import from_first_rank
from dcp_datastates.errors import NoAnswerError


def test_an_answer_without_torch_distributed_is_just_computed():
    assert from_first_rank(lambda: 42, "answer", "the answer") == 42
    with raises(ZeroDivisionError):
        from_first_rank(lambda: 1 // 0, "answer", "the answer")


def test_no_answer_is_a_timeout_error():
    assert issubclass(NoAnswerError, TimeoutError)


@pytest.mark.parametrize(
    "found",
    [
        pickle.dumps((Malice("made"), None)),
        *(b"", b"[", b"\x80", b"{}", b"7", b"[1]", b"[1, 2, 3]", b"[null, 7]", b'[null, "x"]'),
        b"[" * 100_000,
    ],
)
def test_what_a_stranger_writes_is_no_answer_and_runs_nothing(found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoAnswerError, match=r"not tell the latest.* does another program write"):
        first_rank._told(found, 0, "the latest")
    assert list(tmp_path.iterdir()) == []
    pickle.loads(pickle.dumps(Malice("made")))
    assert list(tmp_path.iterdir()), (
        "the pickle must be able to do harm, or this test shows nothing"
    )
