"""``convert`` with the real transformers: a tiny Llama, made from a configuration, on the CPU."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_datastates
from dcp_datastates import CheckpointManager, Weights, convert, diff, follow
from dcp_datastates.weights import publish

transformers = pytest.importorskip("transformers")
logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=request.param,
    )
    return transformers.LlamaForCausalLM(config).eval()


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(20).view(2, 10)).logits
    return found


def _assert_equal(found: Any, expected: Any) -> None:
    weights = expected.state_dict()
    assert found.state_dict().keys() == weights.keys()
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    assert torch.equal(_logits(found), _logits(expected))


def test_saved_state_to_from_pretrained(model: Any, tmp_path: Path) -> None:
    """A training state; the configuration is that of the model which was trained."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(20).view(2, 10), labels=torch.arange(20).view(2, 10)).loss.backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    dcp_datastates.save(state, tmp_path / "step-1")
    model.config.save_pretrained(tmp_path / "config")
    convert(
        tmp_path / "step-1",
        tmp_path / "hf",
        "hf",
        part="model",
        shard_size="20KB",
        config_from=tmp_path / "config",
    )
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_bytes())
    assert len(set(index["weight_map"].values())) > 1
    found, report = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    _assert_equal(found, model)


def test_published_weights_to_from_pretrained_and_into_a_model(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_FILE_BYTES", 20_000)
    model.config.save_pretrained(tmp_path / "config")
    rules = Weights(tmp_path / "w", config_from=tmp_path / "config")
    with CheckpointManager(tmp_path / "run", every=1, publish=rules) as manager:
        manager.save(1, {"model": model})
    (version,) = follow(tmp_path / "w", timeout=0)
    assert len(list(Path(version.path).glob("*.safetensors"))) > 1
    found = transformers.LlamaForCausalLM.from_pretrained(version.path)
    _assert_equal(found.eval(), model)
    with torch.no_grad():
        for each in found.parameters():
            each.zero_()
    version.load_into(found)
    _assert_equal(found, model)


@pytest.mark.parametrize("shard_size", ["20KB", "5GB"], ids=["sharded", "one file"])
def test_save_pretrained_to_a_model(model: Any, shard_size: str, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "hf", max_shard_size=shard_size)
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() is (shard_size == "20KB")
    convert(tmp_path / "hf", tmp_path / "ours")
    assert diff(tmp_path / "hf", tmp_path / "ours").same
    torch.manual_seed(1)
    found = transformers.LlamaForCausalLM(model.config).eval()
    assert not torch.equal(_logits(found), _logits(model))
    weights = found.state_dict()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]  # transformers saves tied weights once
    dcp_datastates.load(tmp_path / "ours", weights, unexpected="error")
    _assert_equal(found, model)


def test_from_folder_to_folder_with_another_dtype(model: Any, tmp_path: Path) -> None:
    """The configuration comes along. transformers casts the weights of the other folder itself."""
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "half", "hf", dtype="bfloat16", shard_size="20KB")
    half, whole = (
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16).eval()
        for name in ("half", "hf")
    )
    _assert_equal(half, whole)
    assert (
        diff(tmp_path / "half", tmp_path / "hf", only="model.norm").differences[0].problem
        == "dtype"
    )


def test_weights_under_a_key_and_back(model: Any, tmp_path: Path) -> None:
    """As a training state has them, by way of a file of torch.save and stock DCP."""
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ours", rename={"": "model."})
    assert dcp_datastates.load(tmp_path / "ours").keys() == {"model"}
    convert(tmp_path / "ours", tmp_path / "stock", "dcp")
    convert(tmp_path / "stock", tmp_path / "file.pt", "torch")
    weights = torch.load(tmp_path / "file.pt", weights_only=True)["model"]
    found = transformers.LlamaForCausalLM(model.config).eval()
    found.load_state_dict(weights, strict=not model.config.tie_word_embeddings)
    _assert_equal(found, model)
    convert(
        tmp_path / "file.pt", tmp_path / "back", "hf", part="model", config_from=tmp_path / "hf"
    )
    _assert_equal(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "back").eval(), model)
