"""The Hugging Face format, as torchtitan has it: a model's adapter names the tensors, torch reads and writes them."""

from __future__ import annotations

import os
from typing import Any, Final

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.storage import presence

_THREADS: Final = 5
"""With which a rank puts shards together, as in torchtitan."""


def save_hugging_face(model_state: dict[str, Any], adapter: Any, path: str) -> None:
    """Save a model's state at ``path``; returns when it is there. Every rank calls this.

    If the adapter says which file each tensor is in, the ranks write shards into ``path/sharded``, and then put them
    together; else torch writes one file.
    """
    files = adapter.fqn_to_index_mapping
    sharded = os.path.join(path, "sharded") if files else path
    writer = HuggingFaceStorageWriter(
        path=sharded,
        save_distributed=True,
        fqn_to_index_mapping=files,
        enable_consolidation=not files,
    )
    dcp.save(adapter.to_hf(model_state), storage_writer=writer)  # type: ignore[attr-defined]
    if files:
        consolidate_safetensors_files_on_every_rank(
            input_dir=sharded, output_dir=path, fqn_to_index_mapping=files, num_threads=_THREADS
        )


def load_hugging_face(model: Any, adapter: Any, path: str, quantized: bool) -> None:
    """Load ``model`` from ``path``, a folder of safetensors files; ``quantized``: their values are. Every rank calls
    it.
    """
    if adapter is None:
        raise ConfigurationError(
            "checkpoint.initial_load_in_hf=True needs an sd_adapter, and the model has none"
        )
    state = adapter.to_hf(model.state_dict())
    dcp.load(state, storage_reader=adapter.get_hf_storage_reader(path, quantized))  # type: ignore[attr-defined]
    model.load_state_dict(adapter.from_hf(state))


def hugging_face_assets(adapter: Any) -> str:
    """The folder that the job names for the weights; raises :class:`ConfigurationError` if it is no directory."""
    path = getattr(adapter, "hf_assets_path", None)
    if not path or not presence.is_directory(path):
        raise ConfigurationError(
            f"model.hf_assets_path={path!r} is no directory to load weights from; correct it, or give "
            f"checkpoint.initial_load_path"
        )
    return str(path)
