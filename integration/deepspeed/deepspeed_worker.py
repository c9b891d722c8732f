"""What the ranks of the tests' jobs do: ``deepspeed_worker.py FUNCTION ROOT RESULT``."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import dcp_datastates.deepspeed.engine as integration
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.storage import decisions, failpoints
from deepspeed_training import (
    RANK,
    SAVED_AFTER,
    STAGES,
    STEPS,
    Changed,
    Grouped,
    Model,
    client_state,
    engine,
    engine_of_file,
    latest,
    micro_batches,
    pipeline,
    train,
)

CACHE = {"host_cache_size": 0.125}


def read_late() -> None:
    """Let reads begin only where the gate asks for them: after forward and backward have changed what they change."""
    stock = integration.async_save

    def late(*args: Any, **options: Any) -> Any:
        if options["reads"] == "immediate":
            options["reads"] = 3600
        return stock(*args, **options)

    integration.async_save = late


def fail_publication(action: str) -> None:
    """Let the writing of a checkpoint's metadata fail; not, if ``action`` is empty."""
    os.environ[failpoints.VARIABLE] = f"publish.write.before={action}" if action else ""
    failpoints.reload()


def trains(root: Path) -> Any:
    """Per stage: the losses without and with this package, and the sizes of its save."""
    read_late()
    results: dict[Any, Any] = {}
    for stage in STAGES:
        results[stage] = {}
        for name, datastates in (("stock", None), ("ours", CACHE)):
            training = engine(stage, datastates)
            losses = []
            for step in range(STEPS):
                losses.append(train(training, step))
                if step == SAVED_AFTER - 1:
                    training.save_checkpoint(
                        root / name / str(stage), client_state=client_state(step)
                    )
            results[stage][name] = losses
            if datastates:
                saved = training.checkpoint_engine.ckpt_engine.last_save
                results[stage]["deferred"] = saved.deferred_bytes
                results[stage]["eager"] = saved.eager_bytes
                results[stage]["gate"] = saved.gate_seconds
            results[stage][f"{name} buffer"] = float(training.module.norm.running_mean.sum())
            training.destroy()
    results["pipeline"] = pipelines(root / "pipeline")
    return results


def resumes(root: Path) -> Any:
    """Per stage: the client state that was loaded, and the losses of the steps after it. From stock's, too."""
    results: dict[str, Any] = {}
    for name, stage in [*(("ours", stage) for stage in STAGES), ("stock", 1)]:
        training = engine(stage, CACHE)
        path, state = training.load_checkpoint(root / name / str(stage))
        assert path is not None
        losses = [train(training, step) for step in range(SAVED_AFTER, STEPS)]
        buffer = float(training.module.norm.running_mean.sum())
        results[f"{name} {stage}"] = {
            "state": repr(state["mine"]),
            "losses": losses,
            "buffer": buffer,
        }
        training.destroy()
    return results


def pipelines(root: Path) -> Any:
    """Two pipeline stages: the losses without and with this package, and those behind a load."""
    results: dict[str, Any] = {}
    for name, datastates in (("stock", None), ("ours", CACHE)):
        training = pipeline(datastates)
        results[name] = []
        for step in range(STEPS):
            results[name].append(float(training.train_batch(micro_batches(step))))
            if step == SAVED_AFTER - 1:
                training.save_checkpoint(root / name)
        if datastates:
            results["deferred"] = training.checkpoint_engine.ckpt_engine.last_save.deferred_bytes
        training.destroy()
    training = pipeline(CACHE)
    training.load_checkpoint(root / "ours")
    rest = range(SAVED_AFTER, STEPS)
    results["resumed"] = [float(training.train_batch(micro_batches(step))) for step in rest]
    return results


def killed(root: Path) -> Any:
    """Saves twice. A failpoint kills rank 0 at the second save's commit, or behind it."""
    training = engine(1, CACHE)
    for step in range(2):
        train(training, step)
        training.save_checkpoint(root, tag=f"tag-{step}", client_state={"step": step})
        training.checkpoint_engine.ckpt_engine.wait(persist=True)
    raise AssertionError("the failpoint was not reached")


def goes_on(root: Path) -> Any:
    """In the directory of each killed job: the step that the newest checkpoint has; and the next save."""
    results = {}
    for each in (root / "uncommitted", root / "unnamed"):
        training = engine(1, CACHE)
        named = latest(each)
        _, state = training.load_checkpoint(each)
        train(training, 1)
        training.save_checkpoint(each, tag="tag-1")
        training.destroy()
        results[each.name] = {"named": named, "step": state["step"]}
    return results


def orders(root: Path) -> Any:
    """Saves whose commits are held back; then saves that fail; then a load right behind a save."""
    held = threading.Event()
    decide = decisions.decide

    def wait_and_decide(*args: Any) -> Any:
        held.wait()
        return decide(*args)

    decisions.decide = wait_and_decide
    training = engine(1, CACHE)
    ours = training.checkpoint_engine.ckpt_engine
    results: dict[str, Any] = {"named": []}

    def note() -> None:
        results["named"].append(latest(root))

    for step in range(2):  # the second save while the first one is in flight
        train(training, step)
        training.save_checkpoint(root)
        note()
    train(training, 2)
    note()
    held.set()
    ours.wait(persist=True)
    dist.barrier()
    note()

    training.save_checkpoint(root, tag="unnamed", save_latest=False)
    ours.wait(persist=True)
    dist.barrier()
    note()

    if RANK == 0:
        (root / "in-the-way").write_text("a file")
    dist.barrier()
    training.save_checkpoint(root, tag="in-the-way")
    try:
        ours.wait(persist=True)
    except ConfigurationError as error:  # no later save to that path could succeed
        results["refused"] = str(error)
    results["failed"] = [ours.failed_saves]
    # Only rank 0 saves the client state: the other rank must hear of it.
    training.save_checkpoint(root, tag="not-picklable", client_state={"function": lambda: None})
    ours.wait(persist=True)
    results["failed"].append(ours.failed_saves)
    fail_publication("error:ENOSPC")
    training.save_checkpoint(root, tag="full")
    ours.wait(persist=True)
    results["failed"].append(ours.failed_saves)
    fail_publication("")
    note()

    train(training, 3)
    losses, expected = [], []
    training.save_checkpoint(root, tag="good", client_state={"good": True})
    _, state = training.load_checkpoint(root)
    note()
    results["state"] = state["good"]
    expected.append(train(training, 4))
    training.load_checkpoint(root, tag="good")
    losses.append(train(training, 4))
    results["same"] = losses == expected

    training.save_16bit_model(root, "model.bin")
    model = torch.load(root / "model.bin") if RANK == 0 else training.module.state_dict()
    results["model"] = sorted(model)
    try:
        training.load_checkpoint(root, tag="in-the-way")
    except Exception as error:
        results["not committed"] = type(error).__name__
    training.save_checkpoint(root, tag="last")  # nothing waits for it, but the end of the process
    return results


def _module_alone(*, src: dict[str, Any], dst: torch.nn.Module) -> None:
    dst.load_state_dict({name: value * 2 for name, value in src.items()})


WAYS: dict[str, tuple[type[Model], dict[str, Any]]] = {
    "as it was": (Model, {}),
    "an older tag": (Model, {"tag": "first"}),
    "without the optimizer": (Model, {"load_optimizer_states": False}),
    "without the schedule": (Model, {"load_lr_scheduler_states": False}),
    "the model alone": (Model, {"load_module_only": True}),
    "with a function of the program": (Model, {"custom_load_fn": _module_alone}),
    "into a program with a layer more": (Changed, {}),
    "into that, not strictly": (
        Changed,
        {"load_module_strict": False, "load_optimizer_states": False},
    ),
    "into other groups of the optimizer": (Grouped, {}),
    "what is not there": (Model, {"tag": "missing"}),
}


def ways(root: Path) -> Any:
    """What each way to load gives, without and with this package: the error, or how training goes on."""
    results: dict[str, Any] = {}
    for name, datastates in (("stock", None), ("ours", CACHE)):
        training = engine(1, datastates)
        train(training, 0)
        training.save_checkpoint(root / name, tag="first", client_state=client_state(0))
        train(training, 1)
        training.save_checkpoint(root / name, client_state=client_state(1))
        training.destroy()
        for way, (model, options) in WAYS.items():
            training = engine(1, datastates, model)
            before = [each.detach().clone() for each in training.module.parameters()]
            try:
                path, state = training.load_checkpoint(root / name, **options)
            except Exception as error:
                same = all(map(torch.equal, training.module.parameters(), before))
                found: Any = f"{type(error).__name__}, weights {'unchanged' if same else 'loaded'}"
            else:
                rates = training.get_lr()
                losses = [train(training, step) for step in (2, 3)]
                found = [path is not None, (state or {}).get("step"), rates, losses]
            results.setdefault(way, {})[name] = found
            training.destroy()
    return results


def example(root: Path) -> Any:
    """With the configuration of the example: the losses, and those after a load."""
    configuration = Path(__file__).parents[2] / "examples/deepspeed.json"
    training = engine_of_file(configuration)
    losses = [train(training, step) for step in range(SAVED_AFTER)]
    training.save_checkpoint(root)
    losses += [train(training, step) for step in range(SAVED_AFTER, STEPS)]
    deferred = training.checkpoint_engine.ckpt_engine.last_save.deferred_bytes
    training.destroy()
    training = engine_of_file(configuration)
    path, _ = training.load_checkpoint(root)
    resumed = [train(training, step) for step in range(SAVED_AFTER, STEPS)]
    training.destroy()
    return {"losses": losses, "resumed": resumed, "path": path, "deferred": deferred}


def universal(root: Path) -> Any:
    """On one rank: the universal checkpoints made from stock's files and from exported ones; the losses behind them."""
    results: dict[str, Any] = {}
    for stage in (1, 3):
        for name in ("stock", "exported"):
            training = engine(stage, CACHE, checkpoint={"load_universal": True})
            training.load_checkpoint(root / name / str(stage))
            losses = [train(training, step) for step in range(SAVED_AFTER, STEPS)]
            results[f"{name} {stage}"] = losses
            training.destroy()
    return results


def main() -> None:
    """Run the function that the command line names; write its result as JSON."""
    logging.basicConfig(level=logging.INFO)
    function: Callable[[Path], Any] = globals()[sys.argv[1]]
    deepspeed.init_distributed("gloo")
    result = function(Path(sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
