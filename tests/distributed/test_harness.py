"""The harness itself: what it must report, and that it survives what tests do to it."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist
from support.jobs.ranks import RankFailure, ranks, run_on_ranks


def _rank_one_fails():
    if dist.get_rank() == 1:
        raise ValueError("the words of rank one")


def test_a_failure_names_the_rank_and_shows_its_traceback():
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(2, _rank_one_fails, timeout=60)
    assert "rank 1 of 2" in str(caught.value)
    assert "ValueError: the words of rank one" in str(caught.value)


@ranks(2)
def _patched_by_one_rank(monkeypatch):
    if dist.get_rank() == 1:
        monkeypatch.setattr(time, "tzname", "patched")


@ranks(2)
def _as_python_made_it(expected):
    assert time.tzname == expected


def test_what_a_rank_patches_ends_with_the_test(monkeypatch):
    _patched_by_one_rank(monkeypatch=monkeypatch)
    _as_python_made_it(expected=time.tzname)


def _rank_zero_dies(code):
    if dist.get_rank() == 0:
        os._exit(code)


@pytest.mark.parametrize("code", [0, 7])
def test_a_process_that_ends_is_reported_and_the_next_test_gets_fresh_ranks(code):
    with pytest.raises(RankFailure, match=f"exit code {code}"):
        run_on_ranks(2, _rank_zero_dies, timeout=60, code=code)
    run_on_ranks(2, _nothing)


def _rank_one_sleeps():
    if dist.get_rank() == 1:
        time.sleep(600)


def test_a_hang_ends_with_the_stacks_of_who_hangs():
    for seconds in (2, 30):  # a busy machine may need more to come as far
        with pytest.raises(RankFailure, match="rank 1 of 2") as caught:
            run_on_ranks(2, _rank_one_sleeps, timeout=seconds)
        if "_rank_one_sleeps" in str(caught.value):
            break
    assert "_rank_one_sleeps" in str(caught.value)
    run_on_ranks(2, _nothing)


def _nothing():
    pass
