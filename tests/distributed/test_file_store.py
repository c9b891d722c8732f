"""Ranks that meet at a file: torch counts who uses it, and removes it with the last."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from support.jobs.scripts import run_program

from dcp_datastates.ranks.rank_set import of_store

TWO_JOBS_AT_ONE_FILE = """
import os, sys, time
rank = 1 if os.fork() == 0 else 0
import torch
import torch.distributed as dist
import dcp_datastates as ds

def job(number):
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meet"), rank=rank, world_size=2)
    ds.async_save({"w": torch.full((10,), float(number))}, f"step-{number}", host_cache_size="32MiB").result()
    dist.destroy_process_group()

def await_that(condition, seconds):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()

job(1)
if rank == 0:
    if not await_that(lambda: not os.path.exists("meet"), 60):
        print("the file is kept when the group is gone", flush=True)
        os.remove("meet")
    open("first-is-over", "w").close()
assert await_that(lambda: os.path.exists("first-is-over"), 60)
job(2)
if rank == 0:
    print("rank 1 ended with", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_a_file_goes_with_its_group_and_may_be_made_anew(tmp_path):
    ended = run_program(TWO_JOBS_AT_ONE_FILE, tmp_path, timeout=90)
    ended.assert_clean()
    assert ended.stdout == "rank 1 ended with 0\n"


def test_a_request_names_a_file_that_was_removed(tmp_path):
    store = dist.FileStore(str(tmp_path / "meet"), 1)
    connection = of_store(0, (0,), store).connect("test")
    connection.set("key", "value")
    (tmp_path / "meet").unlink()
    with pytest.raises(RuntimeError, match=f"was removed: {tmp_path}/meet"):
        connection.get("key")
