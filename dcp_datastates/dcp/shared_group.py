"""A warning for those who leave DCP's collectives on a group that training uses too.

DCP's thread and the training thread then run collectives on one gloo group at once, and their messages mix:
the first save with three ranks that all-reduced meanwhile hung until gloo's timeout. A group
of NCCL and gloo is no problem: training's tensors go by NCCL.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

import torch.distributed as dist

from dcp_datastates.dcp.frames import local_variable

__all__ = ["async_save_call", "warn_if_shared"]

_warned = False


def warn_if_shared(call: FrameType | None) -> None:
    """Warn, once per process, if ``call``, an ``async_save``, uses training's own gloo group."""
    global _warned
    if _warned or not dist.is_available() or not dist.is_initialized():
        return
    if dist.get_world_size() == 1:
        return
    frame = call
    if frame is None or local_variable(frame, "no_dist"):
        return
    group: Any = local_variable(frame, "process_group")
    if group not in (None, dist.group.WORLD) or dist.get_backend(dist.group.WORLD) != "gloo":
        return
    _warned = True
    warnings.warn(
        "async_save runs DCP's collectives on the default gloo group, in a thread of their own. If training "
        "uses that group too, the two mix up each other's messages and hang. Pass "
        'process_group=torch.distributed.new_group(backend="gloo"), made once, to async_save; or use '
        "dcp_datastates.async_save, which brings its own.",
        stacklevel=_depth(frame) + 1,
    )


def async_save_call() -> FrameType | None:
    """The frame of ``torch.distributed.checkpoint.async_save`` above this, if there is one."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "async_save" and code.co_filename.endswith("state_dict_saver.py"):
            return frame
        frame = frame.f_back
    return None


def _depth(target: FrameType) -> int:
    depth, frame = 0, sys._getframe(1)
    while frame is not None and frame is not target:
        depth += 1
        frame = frame.f_back  # type: ignore[assignment]
    return depth + 1
