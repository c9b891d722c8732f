"""Megatron-Core on ranks without a GPU, over gloo. For tests only: no speed is meant.

Megatron's source stays as it is; what stands in its way on a CPU is put aside here, in the ranks that call this:

* tensors are made on "cuda", and moved there; parameters must be of a type of ``torch.cuda``;
* the current device is asked for, and waited for;
* the random states of a GPU become those of the host;
* Megatron's own save starts processes, which daemons may not, and a server for their results.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode


def use_cpu() -> None:
    """Prepare this process, for good."""
    _OnHost().__enter__()
    device: Any = torch.cuda
    device.current_device = lambda: "cpu"
    device.synchronize = lambda *_: None
    device.manual_seed = torch.manual_seed
    device.get_rng_state = lambda *_: torch.get_rng_state()
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    filesystem_async._results_queue = multiprocessing.get_context("fork").Queue()


class _OnHost(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")
        return found
