"""What changes in DeepSpeed, from outside: two methods of ``DeepSpeedEngine`` are wrapped, and one attribute is added.

* ``save_checkpoint``: when DeepSpeed has passed all its files, the save starts. DeepSpeed has no call at this point for
  an engine like its ``DataStatesCheckpointEngine``: its next call would be in the next ``step()``, before the
  optimizer's, when no backward pass is left during which to read. That call is never made, either, since the engine
  inherits a ``get_commit_info()`` that returns None. It stays so: DeepSpeed would write ``latest`` there itself, before
  the bytes are durable.
* ``load_checkpoint``: the saves in flight come first. A load changes the tensors that they read, and needs ``latest``.
* Both refuse a URL, of which DeepSpeed would make a local directory.
* ``DataStatesCheckpointEngine.ckpt_engine``: None on the class. ``cleanup()`` deletes the attribute of the object, and
  reads it again when the object is collected, which printed an AttributeError.

* ``get_last_checkpoint`` of transformers, if that is imported already: it takes the highest number, also where the save
  was not committed. Such directories are left out.

Engines without ``datastates_ckpt`` in their configuration are not affected.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import DataStatesCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.optim import Optimizer

from dcp_datastates.config import Reads
from dcp_datastates.deepspeed.engine import CheckpointEngine
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.manager.step_directories import number_of
from dcp_datastates.staging.ownership import track
from dcp_datastates.storage import attempts, local, presence


def install() -> None:
    """Wrap the methods; called once, at the import."""
    stock_save, stock_load = DeepSpeedEngine.save_checkpoint, DeepSpeedEngine.load_checkpoint

    @functools.wraps(stock_save)
    def save_checkpoint(
        self: DeepSpeedEngine, save_dir: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        ours = _ours(self)
        if ours is None:
            return stock_save(self, save_dir, *args, **kwargs)
        local.local_path(save_dir, name="save_dir")
        if self.zero_nvme_offload_optimizer():
            raise ConfigurationError(
                "datastates_ckpt does not save optimizer state that is offloaded to NVMe; offload it to the CPU, or "
                "remove datastates_ckpt from the configuration"
            )
        with ours.collecting():
            saved = stock_save(self, save_dir, *args, **kwargs)
        adapter = self.checkpoint_engine
        info, adapter.commit_info = adapter.commit_info, None
        ours.commit(info.save_dir, info.tag, info.save_latest, _track(self))
        return saved

    @functools.wraps(stock_load)
    def load_checkpoint(
        self: DeepSpeedEngine, load_dir: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        ours = _ours(self)
        if ours is not None:
            local.local_path(load_dir, name="load_dir")
            ours.settle()
        return stock_load(self, load_dir, *args, **kwargs)

    DataStatesCheckpointEngine.ckpt_engine = None
    DeepSpeedEngine.save_checkpoint = save_checkpoint
    DeepSpeedEngine.load_checkpoint = load_checkpoint
    trainer = sys.modules.get("transformers.trainer")
    if trainer is not None:
        trainer.get_last_checkpoint = newest_committed  # type: ignore[attr-defined]


def newest_committed(folder: str) -> str | None:
    """``transformers.trainer_utils.get_last_checkpoint``, without saves of this package that were not committed."""
    found = [
        (number_of(path, "checkpoint-"), str(path))
        for path in Path(folder).iterdir()
        if presence.is_directory(path) and not any(map(_is_open, path.glob("global_step*")))
    ]
    number, newest = max(found, default=(-1, None))
    return newest if number >= 0 else None


def _is_open(tag: Path) -> bool:
    return bool(attempts.present(tag)) and not attempts.is_taken(tag)


def _ours(engine: DeepSpeedEngine) -> CheckpointEngine | None:
    adapter = engine.checkpoint_engine
    if not isinstance(adapter, DataStatesCheckpointEngine):
        return None
    ours = adapter.ckpt_engine
    return ours if isinstance(ours, CheckpointEngine) else None


def _track(engine: DeepSpeedEngine) -> Reads:
    """Register the optimizers inside ``engine``, and all tensors that change only with their steps.

    Returns when a save reads them: ``"blocking"`` with an optimizer of DeepSpeed's that this module does not know (it
    may change tensors outside the inner optimizer's step).
    """
    outer = engine.optimizer
    inner: list[Any]
    also: Iterable[torch.Tensor] = ()
    if isinstance(outer, Optimizer):
        inner = [outer]
    elif type(outer) is DeepSpeedZeroOptimizer:
        inner = [outer.optimizer]
        # ZeRO copies its fp32 partitions into the parameters after the inner step. Others may change in forward.
        also = [each for group in outer.bit16_groups for each in group]
    elif type(outer) is DeepSpeedZeroOptimizer_Stage3:
        inner = [outer.optimizer, getattr(outer, "backup_optimizer", None)]
        # The inner optimizer has them in its groups only while it steps.
        also = outer.fp32_partitioned_groups_flat
    else:
        return "blocking"
    inner = [each for each in inner if each is not None]
    # ZeRO changes Muon's momentum before the inner step.
    if not all(
        isinstance(each, Optimizer) and "muon" not in type(each).__name__.lower() for each in inner
    ):
        return "blocking"
    also = [tensor for tensor in also if isinstance(tensor, torch.Tensor)]
    for each in inner:
        track(each, also)
    return "immediate"
