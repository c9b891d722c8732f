"""Puts this package's checkpoint manager into the configuration of a torchtitan job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.config.override import derive

from dcp_datastates.config import check_names
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.torchtitan.manager import DataStatesCheckpointManager


def with_datastates(trainer_config: Any, **options: object) -> Any:
    """Replace torchtitan's checkpoint manager in ``trainer_config`` by this package's, in place; returns
    ``trainer_config``.

    Args:
        trainer_config: the result of a config function: any object with a ``checkpoint``.
        options: fields of :class:`DataStatesCheckpointManager.Config`, such as ``host_cache_size``.

    Raises:
        ConfigurationError: an option does not exist or cannot work, or the job's manager is not one of torchtitan's.
    """
    trainer_config.checkpoint = derived(trainer_config.checkpoint, options)
    return trainer_config


def derived(
    config: BaseCheckpointManager.Config, options: Mapping[str, object]
) -> DataStatesCheckpointManager.Config:
    """A config of this package's manager with the fields of ``config``, overridden by ``options``.

    ``async_mode="disabled"``, torchtitan's default, becomes ``"async"``. To make every save wait for its commit, pass
    ``async_mode="disabled"`` in ``options``.

    Raises as :func:`with_datastates`.
    """
    if isinstance(config, DataStatesCheckpointManager.Config):
        base: Any = type(config)
    elif type(config).__module__.startswith("torchtitan.components."):
        base = DataStatesCheckpointManager.Config
    else:
        raise ConfigurationError(
            f"the job's checkpoint manager is configured by {type(config).__qualname__}, which is not torchtitan's: "
            f"derive its manager from DataStatesCheckpointManager instead"
        )
    check_names("the checkpoint manager", options, [field.name for field in fields(base)])
    chosen = dict(options)
    if base is not type(config) and getattr(config, "async_mode", "disabled") == "disabled":
        chosen.setdefault("async_mode", "async")
    return derive(config, base, **chosen)  # type: ignore[no-any-return]
