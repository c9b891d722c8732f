"""``Trainable``: what a checkpoint of the parameters that are trained holds; training goes on from it."""

import pytest
import torch
from support.state.checkpoints import CACHE, raises
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dcp_datastates as ds
from dcp_datastates import Trainable
from dcp_datastates.errors import ConfigurationError

WIDTH = 32


class Adapter(torch.nn.Module):
    """A frozen linear layer, and two small matrices beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(2, WIDTH) / 8)
        self.up = torch.nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


class Net(torch.nn.Module):
    """A body with adapters, a norm with buffers, and a head that is tied to the embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(16, WIDTH)
        self.body = Adapter(torch.nn.Linear(WIDTH, WIDTH))
        self.norm = torch.nn.BatchNorm1d(WIDTH, affine=False)
        self.head = torch.nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.embedding.requires_grad_(False)

    def forward(self, x):
        return self.head(self.norm(self.body(self.embedding(x))))


NORM = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
ADAPTERS = {"body.down", "body.up"}
HEAD = {"embedding.weight", "head.weight"}

TRAINED_AS = {
    "plain": lambda model: model,
    "DDP": DistributedDataParallel,
    "FSDP2": lambda model: fully_shard(model),
    "compiled": lambda model: torch.compile(model, backend="eager"),
}


def _trained(model, steps):
    owned = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(owned, 0.05)
    _go_on(model, optimizer, steps)
    return optimizer


def _go_on(model, optimizer, steps):
    losses = []
    for step in steps:
        numbers = torch.Generator().manual_seed(step)
        x = torch.randint(16, (8,), generator=numbers)
        loss = torch.nn.functional.cross_entropy(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrap", TRAINED_AS.values(), ids=TRAINED_AS)
def test_training_goes_on_from_the_adapters_alone(wrap, tmp_path):
    model = wrap(Net())
    optimizer = _trained(model, range(3))
    state = {"adapter": Trainable(model), "optimizer": optimizer}
    with ds.CheckpointManager(tmp_path, every=1, host_cache_size=CACHE) as manager:
        manager.save(2, state)
    losses = _go_on(model, optimizer, range(3, 6))
    assert set(ds.load(tmp_path / "step-2")["adapter"]) == NORM | ADAPTERS

    model = wrap(Net())
    optimizer = _trained(model, range(0))
    with ds.CheckpointManager(tmp_path, every=1, host_cache_size=CACHE) as manager:
        assert manager.restore_latest({"adapter": Trainable(model), "optimizer": optimizer}) == 2
    assert _go_on(model, optimizer, range(3, 6)) == losses


def test_tied_weights_are_there_under_each_name_or_under_none(tmp_path):
    model = Net()
    assert set(Trainable(model).state_dict()) == NORM | ADAPTERS
    model.head.requires_grad_(True)
    assert set(Trainable(model).state_dict()) == NORM | ADAPTERS | HEAD
    ds.save({"m": Trainable(model)}, tmp_path / "c", host_cache_size=CACHE)
    other = Net()
    torch.nn.init.zeros_(other.head.weight)
    other.head.requires_grad_(True)
    ds.load(tmp_path / "c", {"m": Trainable(other)})
    assert torch.equal(other.embedding.weight, model.embedding.weight)
    assert other.head.weight is other.embedding.weight


def test_buffers_may_be_left_out():
    assert set(Trainable(Net(), buffers=False).state_dict()) == ADAPTERS


def test_a_frozen_part_may_be_named(tmp_path):
    net = Net()
    net.body.down.requires_grad_(False)
    assert "body.down" not in Trainable(net).state_dict()
    ds.save({"net": Trainable(net, also=["body.down"])}, tmp_path / "saved")
    other = Net()
    torch.nn.init.zeros_(other.body.down)
    ds.load(tmp_path / "saved", {"net": Trainable(other, also=["body.down"])})
    assert torch.equal(other.body.down, net.body.down)


def test_what_is_frozen_again_is_not_lost(tmp_path):
    """First the head, then the adapters: the checkpoint of the second phase has both, and so have those after it."""
    model = Net()
    model.body.requires_grad_(False)
    model.head.requires_grad_(True)
    with ds.CheckpointManager(tmp_path, every=1, host_cache_size=CACHE) as manager:
        manager.save(0, {"part": Trainable(model)})
        _trained(model, range(2))
        trained = model.head.weight.detach().clone()
        model.head.requires_grad_(False)
        model.body.down.requires_grad_(True)
        manager.save(1, {"part": Trainable(model)})
    assert set(ds.load(tmp_path / "step-1")["part"]) == NORM | {"body.down"} | HEAD

    again = Net()  # its head is frozen, and never was anything else
    again.body.up.requires_grad_(False)
    part = Trainable(again)
    with ds.CheckpointManager(tmp_path, every=1, host_cache_size=CACHE) as manager:
        assert manager.restore_latest({"part": part}) == 1
        assert torch.equal(again.head.weight, trained)
        manager.save(2, {"part": part})
    assert set(ds.load(tmp_path / "step-2")["part"]) == NORM | {"body.down"} | HEAD


def test_a_checkpoint_that_lacks_a_parameter_names_it(tmp_path):
    model = Net()
    ds.save({"part": Trainable(model)}, tmp_path / "step-0", host_cache_size=CACHE)
    model.head.requires_grad_(True)
    with (
        ds.CheckpointManager(tmp_path, every=1, host_cache_size=CACHE) as manager,
        raises(ds.errors.IncompatibleStateError, "part.head.weight"),
    ):
        manager.restore_latest({"part": Trainable(model)})


def test_only_a_module_has_parameters():
    with raises(ConfigurationError, "torch.nn.Module", "dict"):
        Trainable({"w": torch.ones(1)})
