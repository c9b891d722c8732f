"""Several ranks carry their files to an archive: its commit is one for all, and so is its failure."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future

import pytest
import torch.distributed as dist
from support.jobs.ranks import run_on_ranks
from support.state.archiving import begin, number_in
from support.state.checkpoints import CACHE
from support.state.saving import SMALL, part
from support.stores.server import BUCKET, Bucket, endpoint, use

from dcp_datastates import DataStatesWriter, async_save, verify
from dcp_datastates.checkpoints import copy
from dcp_datastates.errors import CheckpointCorruptError, StorageError
from dcp_datastates.storage.object_path import locate
from dcp_datastates.tiers import carrying
from dcp_datastates.tiers.archive import archive_save


def _three(fast: str, slow: str, url: str) -> None:
    use(url)
    for handle in [begin(fast, slow, number) for number in (1, 2, 3)]:
        handle.archived.result(60)


def test_ranks_share_the_files(tmp_path, s3_root):
    fast = str(tmp_path / "fast")
    run_on_ranks(3, _three, fast=fast, slow=s3_root, url=endpoint())
    assert number_in([s3_root], 3) == 3
    assert number_in([fast, s3_root], 3) == 3
    assert all(verify(f"{s3_root}/step-{number}").whole for number in (1, 2, 3))
    assert Bucket(endpoint()).uploads(s3_root.removeprefix(f"s3://{BUCKET}/")) == []


def _one_fails(fast: str, slow: str) -> None:
    whole = copy.checked_pieces
    failing = [1]

    def damaged(directory, record, count):
        if dist.get_rank() == 1 and failing:
            failing.pop()
            raise CheckpointCorruptError("a byte is damaged")
        return whole(directory, record, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy, "checked_pieces", damaged)
        began = time.monotonic()
        error = begin(fast, slow, 1).archived.exception(60)
        assert time.monotonic() - began < 20
        assert isinstance(error, CheckpointCorruptError)
        if dist.get_rank() != 1:
            assert "rank 1 of 3: a byte is damaged" in str(error)
        begin(fast, slow, 2).archived.result(60)


def test_a_failure_of_one_rank_is_one_of_all_and_the_next_goes_through(tmp_path):
    run_on_ranks(3, _one_fails, fast=str(tmp_path / "fast"), slow=str(tmp_path / "slow"))
    assert number_in([tmp_path / "slow"], 3) == 2


def _comes_twice(fast: str, slow: str) -> None:
    writer = DataStatesWriter(f"{fast}/step-1", host_cache_size=CACHE)
    archived: list[Future[None]] = []

    def archive_twice(save) -> None:
        # The first rank goes on when the others have heard of the first copy, and have nothing more to say.
        archived.append(archive_save(save, locate(slow), 0, dist.barrier))
        archived.append(archive_save(save, locate(slow), 0))

    writer.on_begin = archive_twice
    async_save(part(1, SMALL), writer=writer).result(60)
    archived[1].result(60)
    if dist.get_rank() != 0:
        dist.barrier()


def test_a_checkpoint_that_comes_twice_is_carried_once(tmp_path):
    run_on_ranks(3, _comes_twice, fast=str(tmp_path / "fast"), slow=str(tmp_path / "slow"))
    assert number_in([tmp_path / "slow"], 3) == 1


def _one_is_late(fast: str, slow: str) -> None:
    whole, tries = copy.checked_pieces, itertools.count()

    def refused(directory, record, count):
        if dist.get_rank() == 1 and next(tries) < 4:
            raise StorageError("503 Slow Down")
        return whole(directory, record, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carrying, "_FIRST_PAUSE", 0.05)
        patch.setattr(copy, "checked_pieces", refused)
        for handle in [begin(fast, slow, number) for number in (1, 2)]:
            handle.archived.result(60)


def test_one_rank_that_storage_refuses_is_waited_for(tmp_path):
    run_on_ranks(3, _one_is_late, fast=str(tmp_path / "fast"), slow=str(tmp_path / "slow"))
    assert number_in([tmp_path / "slow"], 3) == 2
