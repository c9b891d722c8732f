"""What a changed program resumes, and what it is refused: alike in the Trainer and in Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


@ENTRANCES
def test_a_module_was_renamed(run: Any, entrance: str, tmp_path: Path) -> None:
    net = Net()
    expected = saved(run, tmp_path, net, adamw(net))
    model = NAMES[entrance][0]
    other = Net(9, body="trunk")
    with pytest.raises(
        ds.errors.IncompatibleStateError, match=r"Give such options to \w+\("
    ) as caught:
        run(tmp_path, other, adamw(other), True)
    assert 'missing="warn"' in str(caught.value)
    other = Net(9, body="trunk")
    rename = {f"{model}.body": f"{model}.trunk"}
    found = run(tmp_path, other, adamw(other), True, rename=rename)
    for name, value in expected.items():
        assert same(found[name.replace("body", "trunk")], value), name


@ENTRANCES
def test_a_layer_was_added(run: Any, entrance: str, tmp_path: Path) -> None:
    net = Net()
    expected = saved(run, tmp_path, net, adamw(net))
    other = Net(9, extra=True)
    new = other.extra.weight.detach().clone()
    found = run(tmp_path, other, adamw(other), True, missing="warn")
    for name, value in expected.items():
        assert same(found[name], value), name
    assert torch.equal(found["extra.weight"][0], new)


@ENTRANCES
def test_the_head_has_another_shape(run: Any, entrance: str, tmp_path: Path) -> None:
    net = Net()
    expected = saved(run, tmp_path, net, adamw(net))
    model, optimizer = NAMES[entrance]
    other = Net(9, head=3)
    with pytest.raises(ds.errors.IncompatibleStateError):
        run(tmp_path, other, adamw(other), True)
    other = Net(9, head=3)
    exclude = [f"{model}.head", f"{optimizer}.state.head"]
    found = run(tmp_path, other, adamw(other), True, exclude=exclude)
    for name in ("body.weight", "body.bias"):
        assert same(found[name], expected[name]), name
    assert found["head.weight"][0].shape == (3, 4)


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
