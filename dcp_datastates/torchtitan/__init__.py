"""Integration with torchtitan, which needs no change in its source.

From the command line of any job::

    --override.imports 'dcp_datastates.torchtitan.datastates={"host_cache_size": "16GiB"}'

or in a config function, for jobs that apply overrides only to their model::

    return with_datastates(config, host_cache_size="16GiB")

Only this subpackage needs torchtitan (0.3.0 or newer).
"""

from __future__ import annotations

from importlib.metadata import version

from dcp_datastates.manager.frameworks import needed, tell_if_untested

with needed(__name__, "torchtitan 0.3.0 or newer", "'torchtitan==0.3.0' tokenizers triton"):
    from torchtitan.components.checkpointer.base import BaseCheckpointManager
    from torchtitan.config.override import override

from dcp_datastates.torchtitan.choose import derived, with_datastates
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
