"""torchtitan's trainer on a machine without an accelerator, over gloo. For tests only: no speed is meant.

Call :func:`use_cpu` before anything of torchtitan is imported, and :func:`use_dense_attention` after. torchtitan's
source stays as it is; what stands in its way on a CPU is put aside here:

* it asks torch for the accelerator, and takes CUDA if there is none: torch answers "cpu";
* its metrics ask the device for its name, its memory and its current index, which ``torch.cpu`` does not know;
* ``torch.distributed.set_timeout`` is newer than torch 2.13, and torchtitan calls it after the first step;
* gloo has no PREMUL_SUM: FSDP2 sums the gradients and divides afterwards;
* FlexAttention has no backward pass on a CPU: the mask is made dense;
* DCP's stager for pinned memory needs an accelerator to pin for: it copies into plain memory, where stock runs
  are compared with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

FLAGS = ["--parallelism.spmd_backend", "partial_dtensor", "--training.disable_cuda_graphs"]
"""What a job's command line needs besides."""

_MEMORY_BYTES = 8 << 30


def use_cpu() -> None:
    """Have torch name the CPU as its accelerator, and fill in what torchtitan asks of one."""
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    device: Any = torch.cpu
    properties = SimpleNamespace(name="cpu", total_memory=_MEMORY_BYTES)
    answers: dict[str, Any] = {
        "current_device": 0,
        "empty_cache": None,
        "get_device_name": "cpu",
        "get_device_properties": properties,
        "memory_stats": {},
        "reset_peak_memory_stats": None,
    }
    for name, answer in answers.items():
        setattr(device, name, _always(answer))
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = _set_timeout  # type: ignore[attr-defined]
    _sum_gradients()


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


def _set_timeout(timeout: timedelta, group: Any = None) -> None:
    distributed_c10d._set_pg_timeout(timeout, group)


def _sum_gradients() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    original = collectives._get_gradient_divide_factors
    signature = inspect.signature(original)

    def summed(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.arguments["force_sum_reduction_for_comms"] = True
        return original(*call.args, **call.kwargs)

    collectives._get_gradient_divide_factors = summed


def use_dense_attention() -> None:
    """Replace torchtitan's compiled FlexAttention by scaled dot products under a dense mask."""
    from torchtitan.models.common.attention import FlexAttention

    FlexAttention._compiled_flex_attn = staticmethod(_dense_attention)


def _dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block_mask: Any,
    scale: float | None = None,
    enable_gqa: bool = False,
    score_mod: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, Any]:
    if score_mod is not None:
        raise NotImplementedError("score_mod: only masks are made dense")
    from torch.nn.attention.flex_attention import create_mask

    mask = create_mask(
        block_mask.mask_mod, query.shape[0], 1, query.shape[2], key.shape[2], device="cpu"
    )
    found = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )
    return found, SimpleNamespace(lse=None)


def use_plain_staging() -> None:
    """Let stock torchtitan's pinned mode run: its stager then neither pins memory nor copies by stream."""
    import torchtitan.components.checkpointer.dcp as checkpointer

    original = checkpointer.StagingOptions

    def plain(**options: Any) -> Any:
        return original(**{**options, "use_pinned_memory": False, "use_non_blocking_copy": False})

    checkpointer.StagingOptions = plain
