"""One rank looks, and all know; here without other ranks."""

from __future__ import annotations

from support.state.checkpoints import raises

from dcp_datastates import NoAnswerError
from dcp_datastates.checkpoints.first_rank import from_first_rank


def test_an_answer_without_torch_distributed_is_just_computed():
    assert from_first_rank(lambda: 42, "answer", "the answer") == 42
    with raises(ZeroDivisionError):
        from_first_rank(lambda: 1 // 0, "answer", "the answer")


def test_no_answer_is_a_timeout_error():
    assert issubclass(NoAnswerError, TimeoutError)
