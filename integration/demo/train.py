"""The worker: torchrun starts one per rank.

The first job (``--job first``) trains twice from the same seed on a 2 x 2 mesh of FSDP2 and tensor
parallelism: once to the end, saving with stock ``FileSystemWriter`` (the uninterrupted run), and once
with ``DataStatesWriter``, until it kills itself. The second job (``--job resume``) goes on from the
newest committed checkpoint, with FSDP2 alone over however many ranks it has.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from checkpoints import newest_committed, step_path
from data import Batches, standard_library
from dcp_datastates import DataStatesReader, track
from events import Begun, Phase, Stepped, emit
from killing import Killer
from model import CONTEXT, Transformer, parallelize
from saving import Saver, WriterName
from state import TrainingState

GLOBAL_BATCH = 8
LEARNING_RATE = 1e-3
WARM_UP = 5
SEED = 2024


class Job:
    """Model, optimizer, schedule and data, from ``SEED`` or from a checkpoint."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(SEED)
        self.model = Transformer()
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        parallelize(self.model, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        track(self.optimizer)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: min(1.0, (done + 1) / WARM_UP)
        )
        self.batches = Batches(standard_library(), batch=GLOBAL_BATCH, context=CONTEXT, seed=SEED)
        self.state = TrainingState(self.model, self.optimizer, self.schedule, self.batches)
        self._data_parallel = mesh["dp"]

    def resume(self, checkpoint: Path) -> None:
        """Load ``checkpoint``, whatever the number of ranks that wrote it."""
        state = self.state.state_dict()
        dcp.load(state, storage_reader=DataStatesReader(checkpoint))
        self.state.load_state_dict(state)

    def step(self) -> float:
        """One iteration; the loss over the global batch, the same on every rank."""
        group = self._data_parallel.get_group()
        world = self._data_parallel.size()
        inputs, targets = self.batches.draw(self._data_parallel.get_local_rank(), world)
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.state.iteration += 1
        average = loss.detach().clone()
        dist.all_reduce(average, group=group)
        return average.item() / world


def train(job: Job, saver: Saver, phase: Phase, last: int, killer: Killer | None = None) -> None:
    """Iterate to ``last``, saving after every iteration."""
    first_rank = dist.get_rank() == 0

    def finish_save() -> None:
        saved = saver.finish()
        if saved and first_rank:
            emit(saved)

    while job.state.iteration < last:
        begun = time.perf_counter()
        loss = job.step()
        stepped = time.perf_counter()
        iteration = job.state.iteration
        finish_save()
        finished = time.perf_counter()
        saver.start(iteration, job.state.state_dict())
        seconds = (stepped - begun) + (time.perf_counter() - finished)
        if first_rank:
            emit(Stepped(phase, iteration, loss, seconds))
            if killer:
                killer.watch(iteration)
    finish_save()


def _begin(phase: Phase, layout: str, job: Job) -> None:
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        emit(Begun(phase, ranks, layout, job.parameters, job.state.iteration))


def first_job(root: Path, iterations: int, group: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    runs: list[tuple[Phase, WriterName]] = [("stock", "stock"), ("datastates", "datastates")]
    for phase, writer in runs:
        job = Job(mesh)
        _begin(phase, "FSDP2 x TP", job)
        killer = None
        if phase == "datastates":
            chosen = random.randint(iterations // 2, iterations - 4)
            killer = Killer(root / phase, phase, chosen)
        train(job, Saver(root / phase, writer, phase, group), phase, iterations, killer)
    raise RuntimeError("no save was ever caught in flight: the job was not killed")


def resumed_job(root: Path, iterations: int, group: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    job = Job(mesh)
    checkpoints = root / "datastates"
    newest = newest_committed(checkpoints)
    if newest is None:
        raise RuntimeError(f"no committed checkpoint in {checkpoints}")
    job.resume(step_path(checkpoints, newest))
    _begin("resumed", "FSDP2", job)
    train(job, Saver(checkpoints, "datastates", "resumed", group), "resumed", iterations)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", choices=["first", "resume"], required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")  # checkpoints never share the group that trains
    run = {"first": first_job, "resume": resumed_job}[arguments.job]
    run(arguments.root, arguments.iterations, group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
