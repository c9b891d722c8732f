"""What is stored of an optimizer, as its ``state_dict()`` gave it."""

import pytest
import torch
from support.state.checkpoints import assert_same

import dcp_datastates as ds
from dcp_datastates.format.optimizer_state import packed_optimizer
from dcp_datastates.manager.frameworks import state_of


class WithNumbers(torch.optim.SGD):
    """Keeps its state under keys that are numbers, and in containers."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {0: torch.ones(2), "of": [torch.zeros(1), {1: "one"}]}
        return super().step(closure)


OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "sgd without a state": torch.optim.SGD,
    "lbfgs": torch.optim.LBFGS,
    "numbers": WithNumbers,
    "tensor rate": lambda given: torch.optim.AdamW(given, lr=torch.tensor(0.5), foreach=False),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stored", [False, True])
def test_a_state_comes_back_as_it_was(tmp_path, kind, groups, stored):
    torch.manual_seed(0)  # LBFGS diverges from some others
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    parts = [model] if groups == 1 or kind == "lbfgs" else reversed(model)  # it takes no more
    optimizer = OPTIMIZERS[kind]([{"params": list(part.parameters())} for part in parts])

    def loss():
        optimizer.zero_grad()
        value = model(torch.ones(1, 2)).sum()
        value.backward()
        return value

    optimizer.step(loss)
    state = state_of({"model": model, "optimizer": optimizer})["optimizer"]
    if stored:
        ds.save({"optimizer": state}, tmp_path / "x")
        state = ds.load(tmp_path / "x")["optimizer"]
    assert_same(packed_optimizer(state), optimizer.state_dict())


def test_states_are_stored_in_the_order_of_the_parameters():
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    for each in (model.bias, model.weight):  # which get their first gradients in this order
        each.grad = torch.ones_like(each)
        optimizer.step()
    state = state_of({"model": model, "optimizer": optimizer})["optimizer"]["state"]
    assert list(state) == ["weight", "bias"]
