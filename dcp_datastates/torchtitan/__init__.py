"""Integration with torchtitan, which needs no change in its source.

From the command line of any job::

    --override.imports 'dcp_datastates.torchtitan.datastates={"host_cache_size": "16GiB"}'

or in a config function, for jobs that apply overrides only to their model::

    return with_datastates(config, host_cache_size="16GiB")

Only this subpackage needs torchtitan (0.3.0 or newer).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version
from typing import Any

from dcp_datastates.manager.frameworks import needed, tell_if_untested

with needed(__name__, "torchtitan 0.3.0 or newer", "'torchtitan==0.3.0' tokenizers triton"):
    from torchtitan.components.checkpointer.base import BaseCheckpointManager
    from torchtitan.config.override import derive, override

from dcp_datastates.config import check_names
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.torchtitan.manager import DataStatesCheckpointManager

__all__ = ["DataStatesCheckpointManager", "datastates", "with_datastates"]

tell_if_untested("torchtitan", version("torchtitan"))


@override(  # type: ignore[untyped-decorator]
    target=BaseCheckpointManager.Config,
    description="Save and load through dcp_datastates",
)
def datastates(
    config: BaseCheckpointManager.Config, **options: object
) -> DataStatesCheckpointManager.Config:
    """The override for ``--override.imports``; ``options`` as for :func:`with_datastates`."""
    return derived(config, options)


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
