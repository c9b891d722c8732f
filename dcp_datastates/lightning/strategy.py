"""Lightning's strategies, whose checkpoints are saved and loaded through this package.

They differ from Lightning's only in these points:

* ``save_checkpoint`` starts a save and returns; all that Lightning saves is one committed checkpoint;
* ``load_checkpoint`` loads it, at any number of ranks, and restores the random numbers of each rank; it leaves
  checkpoints that Lightning itself has saved to Lightning;
* ``remove_checkpoint`` waits, in the background, for the commit of the checkpoint that replaces the removed one;
* ``optimizer_step`` runs forward and backward before the optimizer's ``step()``, and not inside;
* ``teardown`` waits for the saves in flight.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden

from dcp_datastates.checkpoints.delete import delete
from dcp_datastates.checkpoints.find import newest_whole
from dcp_datastates.checkpoints.first_rank import from_first_rank
from dcp_datastates.checkpoints.inventory import remove_all
from dcp_datastates.checkpoints.listing import candidates, newest_first
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
    IncompatibleStateError,
)
from dcp_datastates.io.unpickling import unpickled
from dcp_datastates.lightning.loaded import Loaded, chosen, fitted, meta_of, plain
from dcp_datastates.lightning.stored import (
    COUNT,
    FURTHER_TENSORS,
    META,
    MODEL,
    NAMES,
    OPTIMIZERS,
    lightning_checkpoint,
    optimizer_name,
)
from dcp_datastates.loading.fit import FitOptions
from dcp_datastates.loading.load import load
from dcp_datastates.manager.frameworks import (
    SavesInBackground,
    alike,
    is_ours,
    load_parts,
    state_of,
    with_files,
)
from dcp_datastates.planning.column_planning import serialize
from dcp_datastates.staging.ownership import track
from dcp_datastates.storage import presence
from dcp_datastates.storage.object_path import Location, ObjectPath, locate
from dcp_datastates.training.per_rank import RngState

logger = logging.getLogger(__name__)


class DataStatesStrategyMixin(SavesInBackground):
    """For a strategy of Lightning: ``class S(DataStatesStrategyMixin, ModelParallelStrategy)``.

    Takes ``max_failures``, the options of :class:`~dcp_datastates.DataStatesWriter`, and those of a load (``rename``,
    ``missing`` …), as :class:`SavesInBackground`, beside those of Lightning's strategy. The end of
    ``fit`` raises the error of a failed save, too, as ``max_failures`` says.
    """

    _fills_model = True
    """Whether a load fills the model's shards in place; else Lightning puts whole tensors into it."""

    _loaded: Loaded | None = None
    """The checkpoint of this package that is being loaded."""

    _rng: dict[str, Any] | None = None
    """The random numbers of a loaded checkpoint, until the next batch."""

    # ---- saving --------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)  # type: ignore[misc]
        for optimizer in self.optimizers:  # type: ignore[attr-defined]
            if isinstance(optimizer, torch.optim.Optimizer):
                track(optimizer)  # so that also the first save reads later

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return dict(state_of({MODEL: self._module})[MODEL])

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return dict(state_of({MODEL: self._module, OPTIMIZERS: inner}, [OPTIMIZERS])[OPTIMIZERS])

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Start the save of ``checkpoint``. The directory or URL ``filepath`` is a checkpoint once it is committed.

        After ``fit`` has ended, this waits for the outcome.
        """
        if storage_options is not None:
            raise TypeError(
                f"{type(self).__name__} has no storage_options; a store's credentials come from the environment"
            )
        path = self.broadcast(str(filepath))  # type: ignore[attr-defined]
        meta = dict(checkpoint)
        model, optimizers = meta.pop(MODEL), _numbered(meta.pop(OPTIMIZERS, []))
        meta[FURTHER_TENSORS] = [name for name, value in meta.items() if _is_of_tensors(value)]
        further = {name: meta.pop(name) for name in meta[FURTHER_TENSORS]}
        meta[COUNT] = len(optimizers)
        meta[NAMES] = {} if self._fills_model else self._own_names
        state = {MODEL: model, **optimizers, **further}
        # Each rank's own, because the positions of data loaders may differ.
        files = {META: serialize(meta), self._rng_name: serialize(RngState().state_dict())}
        self._saves.start(with_files(state, files), path)
        # Lightning's handler for SLURM saves, and then has the job queued again and ended.
        requeued = os.path.basename(path).startswith("hpc_ckpt_")
        if requeued or self._trainer.state.status != TrainerStatus.RUNNING:  # it may be read next
            self._saves.wait()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint in the background, once the newest save is committed."""
        path = locate(filepath)
        self._saves.when_committed(lambda: _remove(path), deletes=path)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **keywords: Any
    ) -> Any:
        """Lightning's step. The first call of ``closure``, which runs forward and backward, comes before the
        optimizer's ``step()``: there the step gate waits until a save's tensors have been read, which happens during
        forward and backward.
        """
        first = [closure()]
        return super().optimizer_step(  # type: ignore[misc]
            optimizer, lambda: first.pop() if first else closure(), model, **keywords
        )

    def teardown(self) -> None:
        try:
            self._saves.wait()
        finally:
            super().teardown()  # type: ignore[misc]

    # ---- loading -------------------------------------------------------------------------------

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the checkpoint, and return what Lightning has saved. Where ranks differ, that is this rank's own, or the
        first rank's if there were fewer ranks.

        Shards of models and optimizers are loaded in place. A whole model is returned, as Lightning's own strategies
        return it: ``on_load_checkpoint`` may change it. Waits for the saves in flight, since one may be that of
        ``checkpoint_path``. If ``fit`` was given the newest checkpoint of its folder, and that is damaged, the one
        before it is loaded.

        Raises :class:`CheckpointNotFoundError` for a checkpoint that was not committed, and the errors of
        :func:`~dcp_datastates.load`.
        """
        self._saves.wait()
        path = self.broadcast(str(checkpoint_path))  # type: ignore[attr-defined]
        if not self._is_fitting:
            return self._load_from(path, weights_only)
        return load_newest(path, lambda each: self._load_from(each, weights_only))

    def _load_from(self, path: str, weights_only: bool | None) -> dict[str, Any]:
        self._loaded = self._rng = None
        if not is_ours(path):
            found: dict[str, Any] = super().load_checkpoint(path, weights_only)  # type: ignore[misc]
            return found
        meta, stored = alike(path, lambda: self._read(path, weights_only))
        if self._fills_model:
            self._load_shards(path, meta.get(COUNT, 0))
        else:
            stored[MODEL] = chosen(stored[MODEL], self._load_options)
        checkpoint = lightning_checkpoint(stored, meta)
        self._loaded = Loaded.of(path, checkpoint)
        return checkpoint

    def _read(self, path: str, weights_only: bool | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """What lies beside the shards, and what else is read whole."""
        meta, files = meta_of(path, weights_only)
        if self._is_fitting and (random := files.get(self._rng_name)) is not None:
            self._rng = unpickled(io.BytesIO(random), f"{path}: {self._rng_name}", False)
        names = list(meta[FURTHER_TENSORS])
        if not self._fills_model:
            names.append(MODEL)
            if self._is_fitting and self._hooks_look:
                names += map(optimizer_name, range(meta[COUNT]))
        trusted = weights_only is False or self._load_options.get("allow_objects", False)
        return meta, load(path, only=names, allow_objects=trusted) if names else {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Lightning's. The names are those that the modules have now, whether ``torch.compile`` adds to them or not."""
        if self._loaded is None or self._fills_model:
            super().load_model_state_dict(checkpoint, strict)  # type: ignore[misc]
            return
        self._loaded.take_model(checkpoint[MODEL])
        module = self.lightning_module  # type: ignore[attr-defined]
        with self._loading():
            state = fitted(module, checkpoint[MODEL], self._load_options)
            try:
                super().load_model_state_dict({**checkpoint, MODEL: state}, strict)  # type: ignore[misc]
            except RuntimeError as error:
                raise IncompatibleStateError(
                    f"{self._loaded.path}: {error}\n  Ways out: rename={{old: new}}, missing=, unexpected=, "
                    f"exclude=[…], with stored names such as '{MODEL}.layer.weight'; or on_load_checkpoint."
                ) from error

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers of a whole model by the names that hooks have left. If hooks have changed their states,
        Lightning loads these, by position.
        """
        loaded = self._loaded
        if loaded is None or (self._hooks_look and loaded.has_other_optimizers(checkpoint)):
            super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        elif not self._fills_model:
            options: FitOptions = {"cast": True, **self._load_options}  # as Lightning does
            self._load_parts(loaded.path, [*_numbered(self.optimizers)], loaded.options(options))  # type: ignore[attr-defined]
        if loaded is not None:
            self._restore_random_numbers()

    def _load_shards(self, path: str, saved: int) -> None:
        """Load model and optimizers, of which so many were ``saved``, together: if one does not fit, none changes."""
        strict = self.lightning_module.strict_loading  # type: ignore[attr-defined]
        options: FitOptions = {"missing": "error" if strict else "ignore", **self._load_options}
        optimizers = [*_numbered(self.optimizers)] if self._is_fitting else []  # type: ignore[attr-defined]
        if not strict and optimizers[saved:]:  # strict_loading means the model only
            self._load_parts(path, optimizers[saved:], self._load_options)
        self._load_parts(path, [MODEL, *optimizers], options)
        self._restore_random_numbers()

    def _load_parts(self, path: str, names: list[str], options: FitOptions) -> None:
        parts = {MODEL: self._module, **_numbered(self.optimizers)}  # type: ignore[attr-defined]
        with self._loading():
            load_parts(path, parts, names, **options)

    def _restore_random_numbers(self) -> None:
        """A checkpoint from the end of an epoch is followed by the next epoch's shuffling."""
        if self._rng is not None:
            RngState().load_state_dict(self._rng)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return self._fills_model  # else as Lightning does: optimizers are made of what hooks left

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._rng is not None:
            if batch_idx:  # in the middle of an epoch, the shuffling came before the save
                RngState().load_state_dict(self._rng)
            self._rng = None
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]

    # ---- within --------------------------------------------------------------------------------

    @property
    def _module(self) -> torch.nn.Module:
        assert self.model is not None  # type: ignore[attr-defined]
        return self.model  # type: ignore[attr-defined, no-any-return]

    @property
    def _own_names(self) -> dict[str, str]:
        """The model's own names of those values that are stored under others."""
        keys = self.lightning_module.state_dict()  # type: ignore[attr-defined]
        return {plain(key): key for key in keys if plain(key) != key}

    @property
    def _hooks_look(self) -> bool:
        """Whether there are hooks that see a checkpoint before it is loaded."""
        hooks = (self.lightning_module, *self._trainer.callbacks)  # type: ignore[attr-defined]
        return any(is_overridden("on_load_checkpoint", each) for each in hooks)

    @property
    def _is_fitting(self) -> bool:
        return bool(self._trainer.state.fn == TrainerFn.FITTING)

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer  # type: ignore[attr-defined]

    @property
    def _rng_name(self) -> str:
        return f"rng.rank-{self.global_rank}.pt"  # type: ignore[attr-defined]


class DataStatesModelParallelStrategy(DataStatesStrategyMixin, ModelParallelStrategy):  # type: ignore[misc]
    """Lightning's ``ModelParallelStrategy`` (FSDP2, tensor parallelism), with saves that do not stop training."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if not self._save_distributed_checkpoint:
            raise ConfigurationError(
                "save_distributed_checkpoint=False gathers the whole model on one rank; use Lightning's "
                "ModelParallelStrategy for that, or leave it True"
            )


class DataStatesFSDPStrategy(DataStatesStrategyMixin, FSDPStrategy):  # type: ignore[misc]
    """Lightning's ``FSDPStrategy`` (FSDP1), with saves that do not stop training. ``state_dict_type`` is
    ``"sharded"``.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        keywords.setdefault("state_dict_type", "sharded")
        super().__init__(*arguments, **keywords)
        if self._state_dict_type != "sharded":
            raise ConfigurationError(
                f"state_dict_type={self._state_dict_type!r} gathers the whole model on one rank; use Lightning's "
                f"FSDPStrategy for that, or leave it 'sharded'"
            )


class DataStatesDDPStrategy(DataStatesStrategyMixin, DDPStrategy):  # type: ignore[misc]
    """Lightning's ``DDPStrategy``, with saves that do not stop training, and of which each rank writes a part."""

    _fills_model = False


class DataStatesSingleDeviceStrategy(DataStatesStrategyMixin, SingleDeviceStrategy):  # type: ignore[misc]
    """Lightning's ``SingleDeviceStrategy``, with saves that do not stop training.

    Args:
        device: The device; default: the first GPU, or the CPU without one.
    """

    _fills_model = False

    def __init__(self, device: Any = None, *arguments: Any, **keywords: Any) -> None:
        if device is None:
            device = "cuda:0" if torch.cuda.is_available() else "cpu"
        super().__init__(device, *arguments, **keywords)


def _is_of_tensors(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(each, torch.Tensor) for each in value.values())
    )


def _numbered(values: list[Any]) -> dict[str, Any]:
    return {optimizer_name(number): value for number, value in enumerate(values)}


def _remove(path: Location) -> None:
    try:
        delete(path)
    except CheckpointNotFoundError:  # Lightning has saved it, or no program has
        if isinstance(path, ObjectPath):
            remove_all(path, first=())
            path.store.delete([path.key])
        elif presence.is_directory(path):
            shutil.rmtree(path)
        elif presence.is_there(path):
            path.unlink()


# ---- where the newest checkpoint is damaged ------------------------------------------------------


def load_newest(path: str, load: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """``load(path)``. If ``path`` is the newest checkpoint in its folder, and damaged, the next older one is loaded
    instead. All ranks call this, and ``load`` finds a damage on all of them.

    Raises what ``load`` raises: :class:`CheckpointCorruptError` if no older one is whole, or if another one than the
    newest was named.
    """
    left_out: list[str] = []
    while True:
        try:
            return load(path)
        except CheckpointCorruptError as error:
            left_out.append(locate(path).name)
            if (older := _older(path, left_out)) is None:
                raise
            logger.error("leaving out checkpoint %s, and going on from %s: %s", path, older, error)
            path = older


def _older(path: str, left_out: Sequence[str]) -> str | None:
    folder = locate(path).parent

    def look() -> str | None:
        newest = next(newest_first(candidates(folder)), None)
        if newest is None or newest.path.name != left_out[0]:
            return None
        found = newest_whole([folder], "structure", lambda each: each.name not in left_out)
        return str(found[0]) if found else None

    return from_first_rank(look, "older", f"the checkpoint before {path}")
