"""The metadata that all ranks' reports come to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.state.chunks import Box
from support.state.plans import item, plan, thing
from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_datastates.errors import DataStatesError
from dcp_datastates.format.metadata import decode
from dcp_datastates.planning.balance import assign
from dcp_datastates.planning.global_plan import GlobalPlan
from dcp_datastates.planning.messages import RankReport, Report
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.claims import Claim

PLANS = [
    plan(item("a", (4, 2), Box((0, 0), (1, 2))), thing("o"), item("b", (3,))),
    plan(item("a", (4, 2), Box((1, 0), (3, 2)))),
    plan(),
]
ATTEMPT = Attempt(1 << 60, 7)
LENGTHS = [[8, 5, 12], [24], []]
"""Bytes of each rank's items, in their order."""


def _global_plan():
    return GlobalPlan(PLANS, *assign(PLANS))


def _report(rank, start=4096):
    """One file with the rank's items one behind the other."""
    sizes = np.array(LENGTHS[rank], np.int64)
    if not len(sizes):
        return Report((), *(np.zeros(0, np.int64) for _ in range(3)))
    end = int(start + sizes.sum())
    table = end + -end % 4
    file = (
        f"r{rank}.safetensors",
        table + 8,
        table,
    )  # two checksums: of one MiB, and of themselves
    return Report((file,), np.zeros_like(sizes), start + np.cumsum(sizes) - sizes, sizes)


def _sent(reports, by_digest=()):
    return [
        RankReport(each.digest, data=b"" if rank in by_digest else each.encode()).encode()
        for rank, each in enumerate(reports)
    ]


def _composed(whole, sent):
    return whole.compose(whole.reports, {})(sent)


def _places(composed):
    """By name: the file, offset and length of each chunk or object."""
    table = decode(composed(StorageMeta(), Claim(ATTEMPT, None), None), Path("m"))
    placement = table.placement
    columns = (placement.files, placement.begins, placement.lengths)
    files, offsets, lengths = (column.tolist() for column in columns)
    rows = zip(table.catalog.owners().tolist(), files, offsets, lengths, strict=True)
    found = {}
    for name, file, offset, length in rows:
        place = (table.placement.paths[file], offset, length)
        found.setdefault(table.catalog.names[name], []).append(place)
    return found


def test_every_item_is_where_its_rank_reports_it_below_the_attempt():
    composed = _composed(_global_plan(), _sent([_report(rank) for rank in range(3)]))
    zero, one = (f"{ATTEMPT.name}/r{rank}.safetensors" for rank in (0, 1))
    assert _places(composed) == {
        "a": [(zero, 4096, 8), (one, 4096, 24)],
        "o": [(zero, 4104, 5)],
        "b": [(zero, 4109, 12)],
    }


def test_a_report_by_digest_is_the_one_that_the_coordinator_has_named():
    whole = _global_plan()
    first, moved = ([_report(rank, start) for rank in range(3)] for start in (4096, 8192))
    assert {each.report for each in whole.answers([b""] * 3, whole.reports)} == {b""}
    in_full = _places(_composed(whole, _sent(first)))
    named = whole.reports
    assert [each.report for each in whole.answers([b""] * 3, named)] == [r.digest for r in first]
    assert _places(_composed(whole, _sent(moved))) != in_full
    again = whole.compose(named, {})(_sent(first, by_digest=(0, 1, 2)))
    assert _places(again) == in_full, "though a report of another save has come meanwhile"


def test_a_digest_that_is_not_known_is_refused_and_names_the_rank():
    reports = [_report(rank) for rank in range(3)]
    whole = _global_plan()
    for _ in range(2):
        with pytest.raises(DataStatesError, match="rank 1 sent the digest of a report"):
            _composed(whole, _sent(reports, by_digest=(1,)))
        _composed(_global_plan(), _sent(reports))  # whose reports are its own
    _composed(whole, _sent([_report(rank, 8192) for rank in range(3)]))
    with pytest.raises(DataStatesError, match="rank 1 sent the digest of a report"):
        _composed(whole, _sent(reports, by_digest=(1,)))


def test_a_rank_that_has_its_share_is_named_it():
    whole = _global_plan()
    digests = [share.digest for share in whole.shares]
    answers = whole.answers([digests[0], digests[0], b""], whole.reports)
    assert [each.digest for each in answers] == digests
    assert [bool(each.data) for each in answers] == [False, True, True]
