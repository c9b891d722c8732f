"""Training jobs with the real Megatron-Core, as the ranks run them."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import check_is_distributed_checkpoint
from megatron.core.dist_checkpointing.dict_utils import diff
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from support.waiting import await_that
from torch.distributed.checkpoint.api import CheckpointException

from dcp_datastates.megatron import DataStatesSaveStrategy, use_by_default
from megatron_cpu import use_cpu

WORDS = 512
LENGTH = 16
WIDTH = 128


class Job:
    """A GPT of two layers, with dropout, and Megatron's distributed optimizer.

    Args:
        tp: ranks of a model; the others repeat it.
        sharding: the optimizer's format, "dp_reshardable" or "fully_reshardable".
    """

    def __init__(self, tp: int = 1, sharding: str = "dp_reshardable") -> None:
        warnings.simplefilter("ignore")
        use_cpu()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        torch.manual_seed(1)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=WIDTH,
            num_attention_heads=4,
            use_cpu_initialization=True,
            params_dtype=torch.bfloat16,
            bf16=True,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
        )
        model = GPTModel(config, get_gpt_layer_local_spec(), WORDS, LENGTH)
        shared = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.model = DistributedDataParallel(config, shared, model.bfloat16())
        options = OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True
        )
        self.optimizer = get_megatron_optimizer(options, [self.model])
        self.format = {
            "distrib_optim_sharding_type": sharding,
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
        }
        self.step = 0

    def train(self) -> str:
        """One step; returns this rank's loss."""
        self.step += 1
        seed = 100 * self.step + parallel_state.get_data_parallel_rank()
        words = torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
        later = torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        positions = torch.arange(LENGTH).expand(2, LENGTH)
        loss = self.model(words, positions, later, labels=words).float().mean()
        loss.backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        return float(loss.detach()).hex()

    def state(self, loading: bool = False) -> dict[str, Any]:
        if loading and self.step == 0:  # torch's Adam has no state yet, and Megatron wants one here
            for each in self.optimizer.chained_optimizers:
                each._init_optimizer_states_with_dummy_values()
        model = self.model.module.sharded_state_dict(metadata=self.format)
        optimizer = self.optimizer.sharded_state_dict(
            model, is_loading=loading, metadata=self.format
        )
        random = [tensor_parallel.get_cuda_rng_tracker().get_states(), torch.get_rng_state()]
        rank, world = dist.get_rank(), dist.get_world_size()
        return {
            "model": model,
            "optimizer": optimizer,
            "random": ShardedObject("random", random, (world,), (rank,)),
            "step": self.step,
        }

    def load(self, path: Path, **arguments: Any) -> None:
        found = dist_checkpointing.load(self.state(loading=True), str(path), **arguments)
        self.model.module.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        tensor_parallel.get_cuda_rng_tracker().set_states(found["random"][0])
        torch.set_rng_state(found["random"][1])
        self.step = found["step"]
        # Megatron gives all of torch's Adam states one step, the same tensor; Apex has it in the groups.
        for each in self.optimizer.chained_optimizers:
            for state in each.optimizer.state.values():
                state["step"] = torch.tensor(float(self.step))


def tracker(root: Path) -> Path:
    return root / "latest_checkpointed_iteration.txt"


def made(path: Path) -> str:
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return str(path)


def train(
    folder: str,
    steps: int = 6,
    *,
    tp: int = 1,
    wraps: bool = False,
    kill: int = 0,
    final: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Train as Megatron-LM does, with a save in each second step, and resume from what its tracker names.

    Args:
        wraps: whether Megatron's strategies for fully parallel saves and loads are around the others.
        kill: the step after which the ranks kill themselves, when the save in that step has begun.
        final: whether all earlier saves are final by then.
        options: of the save strategy.
    """
    root, job, losses = Path(folder), Job(tp), {}
    strategy: Any = DataStatesSaveStrategy(**options)
    reading: Any = TorchDistLoadShardedStrategy()
    if wraps:
        strategy = FullyParallelSaveStrategyWrapper(strategy)
        reading = FullyParallelLoadStrategyWrapper(reading)
    queue = AsyncCallsQueue()
    error = ""
    if tracker(root).exists():
        job.load(root / tracker(root).read_text(), sharded_strategy=reading)
    while job.step < steps:
        loss = job.train()
        losses[job.step] = loss
        try:
            queue.maybe_finalize_async_calls()
            if job.step % 2 == 0:
                save(job, root, strategy, queue)
        except Exception as failed:
            error = str(failed)
            break
        if job.step == kill:
            if final:
                await_that(lambda: only_newest_in_flight(queue))  # the ranks ask together
                await_that(lambda: begun(root / f"{kill}"))
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    if not error:
        queue.maybe_finalize_async_calls(blocking=True)
    return {"losses": losses, "error": error}


def only_newest_in_flight(queue: AsyncCallsQueue) -> bool:
    queue.maybe_finalize_async_calls()
    return bool(queue.get_num_unfinalized_calls() == 1)


def begun(path: Path) -> bool:
    return any(each.is_dir() for each in path.iterdir())


def save(job: Job, root: Path, strategy: Any, queue: AsyncCallsQueue) -> None:
    """Start a save of ``job``, which the tracker names when it is final."""
    step = job.step
    path = made(root / f"{step}")
    request = dist_checkpointing.save(job.state(), path, strategy, async_sharded_save=True)
    # An optimizer owns the fp32 parameters and the moments: 12 of 14 bytes, of all but small tensors.
    stats = request.async_fn.__self__.stats
    assert stats.deferred_bytes > 2 * stats.eager_bytes > 0, stats

    def track() -> None:
        if dist.get_rank() == 0:
            tracker(root).write_text(f"{step}")
        dist.barrier()

    request.add_finalize_fn(track)
    queue.schedule_async_request(request)


def save_both(folder: str) -> None:
    """The same state, saved by Megatron's own strategy and by ours."""
    root, job = Path(folder), Job(tp=2, sharding="fully_reshardable")
    job.train()
    for name, strategy in (
        ("stock", TorchDistSaveShardedStrategy("torch_dist", 1)),
        ("ours", DataStatesSaveStrategy()),
    ):
        saved(job, root / name, strategy, tries=3 if name == "stock" else 1)


def saved(job: Job, path: Path, strategy: Any, tries: int) -> None:
    """Save. Megatron's own writer hands its results through a process that it starts, and now and then finds none: then
    its save fails on all ranks ("results_queue should not be empty"), which says nothing about this package.
    """
    for left in reversed(range(tries)):
        try:
            dist_checkpointing.save(job.state(), made(path), strategy)
        except CheckpointException as error:
            if not left:
                raise
            warnings.warn(f"Megatron's own save failed, and is tried again: {error}", stacklevel=1)
        else:
            return


def compare(folder: str, names: list[str]) -> dict[str, Any]:
    """Load checkpoints of :func:`save_both` at this job's number of ranks, and compare with the first."""
    job, loaded = Job(tp=dist.get_world_size(), sharding="fully_reshardable"), []
    for name in names:
        path = f"{folder}/{name}"
        state = job.state(loading=True)
        ranks = range(dist.get_rank(), 2, dist.get_world_size())
        state["random"] = [ShardedObject("random", None, (2,), (each,)) for each in ranks]
        found, missing, unexpected = dist_checkpointing.load(state, path, strict="return_all")
        assert not missing, missing
        # A larger vocabulary: Megatron pads it, as the number of ranks demands. And another dtype.
        words = ShardedTensor.from_rank_offsets(
            "embedding.word_embeddings.weight",
            torch.ones(WORDS + 64, WIDTH),
            allow_shape_mismatch=True,
        )
        padded = dist_checkpointing.load({"words": words}, path, validate_access_integrity=False)
        loaded.append([found, sorted(unexpected), padded["words"]])
    return {
        "strict": [_by_strictness(f"{folder}/{name}") for name in names],
        "different": [diff(dict(enumerate(loaded[0])), dict(enumerate(each))) for each in loaded],
        "padding": float(loaded[0][2][WORDS:].abs().sum()),
        "filled": float(loaded[0][2][:WORDS].abs().sum()),
    }


def _by_strictness(path: str) -> dict[str, Any]:
    """By each of Megatron's ways to treat a state that has one tensor more and others less: what comes of a load."""
    results: dict[str, Any] = {}
    for each in StrictHandling:
        state = {"weight": _whole("embedding.word_embeddings.weight", WORDS, WIDTH)}
        for what, more in (("less", {}), ("more", {"added": _whole("added", 4, 4)})):
            try:
                found = dist_checkpointing.load(
                    {**state, **more}, path, strict=each, validate_access_integrity=False
                )
            except (Exception, CheckpointException) as error:
                results[f"{each.value}, {what}"] = type(error).__name__
                continue
            values, *names = found if isinstance(found, tuple) else (found,)
            sums = {name: float(values[name].sum()) for name in values if name in (*state, *more)}
            results[f"{each.value}, {what}"] = [sums, *map(sorted, names)]
    return results


def _whole(name: str, *size: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(name, torch.ones(*size), allow_shape_mismatch=True)


def load_without_package(folder: str) -> None:
    """Load as Megatron does where this package is not imported."""
    strategies._get_filesystem_reader = strategies._get_filesystem_reader.__wrapped__
    dist_checkpointing.load_plain_tensors(folder)


def replace(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Save twice to one path; whether it is a checkpoint for Megatron before, during and after the second save."""
    use_cpu()
    path, values, seen = made(Path(folder)), [], []
    weight = torch.nn.Parameter(torch.ones(1 << 16))
    optimizer = torch.optim.SGD([weight], lr=1.0, maximize=True)
    strategy, queue = DataStatesSaveStrategy(**options), AsyncCallsQueue()

    def state() -> dict[str, Any]:
        return {"weight": ShardedTensor.from_rank_offsets("weight", weight.data)}

    def look() -> None:
        seen.append(check_is_distributed_checkpoint(path))
        if seen[-1]:
            values.append(float(dist_checkpointing.load_plain_tensors(path)["weight"][0]))

    dist_checkpointing.save(state(), path, strategy)
    look()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    queue.schedule_async_request(
        dist_checkpointing.save(state(), path, strategy, async_sharded_save=True)
    )
    look()
    queue.maybe_finalize_async_calls(blocking=True)
    look()
    return {"complete": seen, "values": values}


def choose_by_format(folder: str) -> dict[str, Any]:
    """The strategies that Megatron chooses for its format; a save by the second, of a tensor that differs on the ranks,
    with rank 1 as its main replica.
    """
    use_cpu()
    found = [get_default_save_sharded_strategy("torch_dist")]
    use_by_default(host_cache_size="64MiB")
    found.append(get_default_save_sharded_strategy("torch_dist"))
    rank, path = dist.get_rank(), made(Path(folder))
    tensor = ShardedTensor.from_rank_offsets("w", torch.tensor([float(rank)]), replica_id=1 - rank)
    dist_checkpointing.save({"w": tensor}, path)
    stored = dist_checkpointing.load_plain_tensors(path)
    return {"chosen": [type(each).__name__ for each in found], "stored": stored["w"].tolist()}
