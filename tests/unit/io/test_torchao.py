"""torchao's quantized optimizer states and weights, saved and loaded as their parts."""

import pytest
import torch
import torch.distributed as dist
from support.jobs.ranks import ranks
from support.state.checkpoints import async_save, load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

pytest.importorskip("torchao.optim", exc_type=ImportError)  # it may not fit another torch
pytest.importorskip("torchao.quantization", exc_type=ImportError)

from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("kind", [AdamW8bit, AdamW4bit, AdamWFp8])
def test_optimizer_states_are_read_before_the_next_step(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # it takes minutes

    def train(optimizer, model, seed):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    def stepped(seed):
        model = torch.nn.Linear(512, 512)
        optimizer = kind(model.parameters())
        train(optimizer, model, seed)
        return model, optimizer

    def moments(optimizer):
        states = optimizer.state_dict()["state"].values()
        return {f"{at}.{name}": state[name] for at, state in enumerate(states) for name in MOMENTS}

    model, optimizer = stepped(1)
    saved = moments(optimizer)
    expected = {name: state.dequantize() for name, state in saved.items() if _wraps(state)}
    future = async_save(saved, tmp_path, reads=3600)
    assert not future.done()
    train(optimizer, model, 2)
    future.result(60)
    found = moments(stepped(3)[1])
    load(found, tmp_path, unexpected="error")
    assert len(expected) == 2  # of the weight; the bias is too small
    for name, values in expected.items():
        assert not torch.equal(saved[name].dequantize(), values)
        assert torch.equal(found[name].dequantize(), values)


def _wraps(state):
    return hasattr(state, "dequantize") and type(state) is not torch.Tensor


@pytest.mark.parametrize("config", [Int8WeightOnlyConfig(), Float8WeightOnlyConfig()])
def test_quantized_weights_come_back(config, tmp_path):
    def model(seed):
        torch.manual_seed(seed)
        made = torch.nn.Linear(256, 128, dtype=torch.bfloat16)
        quantize_(made, config)
        return made

    saved, found = model(1), model(2)
    async_save(saved.state_dict(), tmp_path).result(60)
    load(found.state_dict(), tmp_path, unexpected="error")
    assert torch.equal(found.weight.dequantize(), saved.weight.dequantize())


@ranks(2)
def test_sharded_optimizer_states_load_at_other_ranks(shared_dir):
    mesh = init_device_mesh("cpu", (2,))
    whole = OptimState8bit.zeros((64, 256))
    whole.copy_(torch.randn(64, 256, generator=torch.Generator().manual_seed(1)))
    rank = dist.get_rank()
    rows = whole[rank * 32 : (rank + 1) * 32]
    state = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)
    async_save({"m": state}, shared_dir).result(60)
    sharded = DTensor.from_local(OptimState8bit.zeros((32, 256)), mesh, [Shard(0)], run_check=False)
    plain = OptimState8bit.zeros((64, 256))
    load({"m": sharded}, shared_dir, unexpected="error")
    load({"m": plain}, shared_dir, unexpected="error")
    assert torch.equal(sharded.to_local().dequantize(), rows.dequantize())
    assert torch.equal(plain.dequantize(), whole.dequantize())
