"""Torch's own Hugging Face reader, given the attempt's directory, reshards what several ranks saved."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.jobs.ranks import run_on_ranks
from support.state.checkpoints import assert_same, attempts, save, zeros
from support.state.meshes import Block, collect, fsdp_tp, full
from torch.distributed.checkpoint import HuggingFaceStorageReader


def _saves(shape, path):
    state = collect(*fsdp_tp(Block(), shape))
    save({**state, "object": {"a": 1}}, path / "c")
    reference = {name: full(tensor) for name, tensor in state.items()}
    if dist.get_rank() == 0:
        torch.save(reference, path / "dense.pt")


def _loads(shape, path):
    state = collect(*fsdp_tp(Block(seed=1), shape))
    target = zeros(state)
    (attempt,) = attempts(path / "c")
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(attempt)))
    expected = torch.load(path / "dense.pt", weights_only=True)
    assert_same({name: full(tensor) for name, tensor in target.items()}, expected)


def test_the_hugging_face_reader_reshards_across_ranks(shared_dir):
    run_on_ranks(4, _saves, shape=(2, 2), path=shared_dir)
    run_on_ranks(2, _loads, shape=(2, 1), path=shared_dir)
    run_on_ranks(4, _loads, shape=(1, 4), path=shared_dir)
    run_on_ranks(1, _loads_dense, path=shared_dir)


def _loads_dense(path):
    expected = torch.load(path / "dense.pt", weights_only=True)
    target = zeros(expected)
    (attempt,) = attempts(path / "c")
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(attempt)))
    assert_same(target, expected)
