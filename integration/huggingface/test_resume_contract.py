"""What a changed program resumes, and what it is refused: alike in the Trainer and in Accelerate."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import TrainingArguments

import dcp_datastates as ds
from dcp_datastates.huggingface import DataStatesAccelerator, DataStatesTrainer

NAMES = {"trainer": ("model", "optimizer"), "accelerate": ("model_0", "optimizer_0")}
"""Of the model and of the optimizer in a checkpoint."""


class Net(torch.nn.Module):
    def __init__(
        self, seed: int = 1, body: str = "body", head: int = 1, extra: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.names = [body, "head"]
        self.add_module(body, torch.nn.Linear(4, 4))
        self.head = torch.nn.Linear(4, head)
        self.extra = torch.nn.Linear(4, 4) if extra else torch.nn.Identity()

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        hidden = self.extra(self.get_submodule(self.names[0])(x))
        return {"loss": self.head(hidden).square().mean()}


def adamw(net: torch.nn.Module, **settings: Any) -> Any:
    return torch.optim.AdamW(net.parameters(), lr=0.01, **settings)


def trainer(folder: Path, net: Net, optimizer: Any, resume: bool, **options: Any) -> Any:
    args = TrainingArguments(
        str(folder),
        max_steps=2 if resume else 1,
        save_steps=1,
        save_strategy="no" if resume else "steps",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        logging_strategy="no",
    )
    data = [{"x": torch.ones(4)}] * 8
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, 1)
    made = DataStatesTrainer(
        model=net, args=args, train_dataset=data, optimizers=(optimizer, schedule), **options
    )
    made._prepare_inputs = lambda inputs: inputs
    # The loaded state, before a step changes it.
    found: dict[str, Any] = {}
    made.training_step = stop(net, optimizer, found) if resume else made.training_step
    made.train(resume_from_checkpoint=resume)
    return found


def stop(net: Net, optimizer: Any, found: dict[str, Any]) -> Any:
    def training_step(*_: Any) -> torch.Tensor:
        found.update(state_of(net, optimizer))
        return torch.zeros(())

    return training_step


def accelerate(folder: Path, net: Net, optimizer: Any, resume: bool, **options: Any) -> Any:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = DataStatesAccelerator(cpu=True, **options)
    net, optimizer = accelerator.prepare(net, optimizer)
    if not resume:
        accelerator.backward(net(torch.ones(8, 4))["loss"])
        optimizer.step()
        accelerator.save_state(str(folder / "saved"))
        accelerator.wait_for_saves()
        return {}
    accelerator.load_state(str(folder / "saved"))
    return state_of(net, optimizer.optimizer)


def state_of(net: Any, optimizer: Any) -> dict[str, Any]:
    """Weights and moments by name: copies."""
    return {
        name: (each.detach().clone(), optimizer.state.get(each, {}).get("exp_avg"))
        for name, each in net.named_parameters()
    }


ENTRANCES = pytest.mark.parametrize(
    ("run", "entrance"), [(trainer, "trainer"), (accelerate, "accelerate")], ids=list(NAMES)
)


def saved(run: Any, folder: Path, net: Net, optimizer: Any) -> dict[str, Any]:
    run(folder, net, optimizer, False)
    return state_of(net, optimizer)


def same(found: Any, expected: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Change(NamedTuple):
    """What is another in the program that resumes, and the options with which it does."""

    net: dict[str, Any]
    options: Callable[[str, str], dict[str, Any]]
    """Of the names of the model and of the optimizer."""
    lacks: str = "no parameter"
    """What begins anew."""


CHANGES = {
    "a module was renamed": Change(
        {"body": "trunk"}, lambda model, _: {"rename": {f"{model}.body": f"{model}.trunk"}}
    ),
    "a layer was added": Change({"extra": True}, lambda *_: {"missing": "warn"}),
    "the head has another shape": Change(
        {"head": 3},
        lambda model, optimizer: {"exclude": [f"{model}.head", f"{optimizer}.state.head"]},
        "head",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@ENTRANCES
def test_a_changed_program_resumes_with_the_options_that_the_refusal_names(
    run: Any, entrance: str, change: str, tmp_path: Path
) -> None:
    given, options, lacks = CHANGES[change]
    net = Net()
    expected = saved(run, tmp_path, net, adamw(net))
    other = Net(9, **given)
    with pytest.raises(ds.errors.IncompatibleStateError) as caught:
        run(tmp_path, other, adamw(other), True)
    if change != "the head has another shape":
        assert re.search(r"Give such options to \w+\(", str(caught.value))
        assert 'missing="warn"' in str(caught.value)
    other = Net(9, **given)
    made = {name: each.detach().clone() for name, each in other.named_parameters()}
    found = run(tmp_path, other, adamw(other), True, **options(*NAMES[entrance]))
    kept = {
        name.replace("body", given.get("body", "body")): value
        for name, value in expected.items()
        if not name.startswith(lacks)
    }
    for name, value in kept.items():
        assert same(found[name], value), name
    for name in found.keys() - kept.keys():
        assert torch.equal(found[name][0], made[name]), name


@pytest.mark.parametrize("change", ["one more at the resume", "one less at the resume"])
@ENTRANCES
def test_settings_of_groups_never_refuse_a_resume(
    run: Any, entrance: str, change: str, tmp_path: Path
) -> None:
    """A scheduler puts ``initial_lr`` into the groups; a newer torch has settings that an older one had not."""
    net = Net()
    optimizer = adamw(net)
    more = {"initial_lr": 0.01, "a_newer_setting": True}
    if "less" in change:
        optimizer.param_groups[0].update(more)
    expected = saved(run, tmp_path, net, optimizer)
    other = Net(9)
    optimizer = adamw(other)
    if "more" in change:
        optimizer.param_groups[0].update(more)
    found = run(tmp_path, other, optimizer, True)
    for name, value in expected.items():
        assert same(found[name], value), name
    assert optimizer.param_groups[0]["lr"] == 0.01


@ENTRANCES
def test_an_optimizer_that_does_not_fit_leaves_the_model_as_it_is(
    run: Any, entrance: str, tmp_path: Path
) -> None:
    net = Net()
    saved(run, tmp_path, net, adamw(net))
    other = Net(9)
    made = {name: each.detach().clone() for name, each in other.named_parameters()}
    with pytest.raises(ds.errors.IncompatibleStateError, match="is that of AdamW"):
        run(tmp_path, other, torch.optim.SGD(other.parameters(), 0.01, momentum=0.9), True)
    for name, each in other.named_parameters():
        assert torch.equal(each, made[name]), name
