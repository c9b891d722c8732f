"""Integration with Megatron-Core, whose ``dist_checkpointing`` saves and loads through this package.

    from dcp_datastates.megatron import DataStatesSaveStrategy

    strategy = DataStatesSaveStrategy(host_cache_size="16GiB")
    request = dist_checkpointing.save(state, path, strategy, async_sharded_save=True)
    queue.schedule_async_request(request)
    ...
    queue.maybe_finalize_async_calls()  # after each step: metadata.json follows the commit

A checkpoint is Megatron's directory, with its ``common.pt`` and ``metadata.json``; the sharded part is in this
package's format. The save starts in ``dist_checkpointing.save``, and no process is forked for it. When it is committed
on all ranks, Megatron writes ``metadata.json``. Without that file, a directory is no checkpoint to Megatron.

The import changes three things in Megatron, from outside (``strategy.py``): its queue of asynchronous saves waits for
commits, its own load strategy reads this package's checkpoints, and :func:`use_by_default` has a say in its choice of
the save strategy.

Only this subpackage needs megatron-core (0.16).
"""

from __future__ import annotations

from dcp_datastates.manager.frameworks import needed, tell_if_untested

with needed(__name__, "megatron-core 0.16", "'megatron-core>=0.16,<0.17'"):
    import megatron.core

from dcp_datastates.megatron.strategy import DataStatesSaveStrategy, install, use_by_default

__all__ = ["DataStatesSaveStrategy", "use_by_default"]

tell_if_untested("megatron-core", megatron.core.__version__)
install()
del megatron
