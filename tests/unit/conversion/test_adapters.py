"""PEFT's layout: which parameters of a checkpoint are an adapter's, and under which names a file has them.

``integration/huggingface`` compares with what PEFT itself saves.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.state.checkpoints import save

from dcp_datastates import convert
from dcp_datastates.errors import ConfigurationError

from .conftest import SMALL

LAYER = "base_model.model.layers.0.q"
STORED = {
    f"{LAYER}.base_layer.weight": None,
    f"{LAYER}.lora_A.default.weight": f"{LAYER}.lora_A.weight",
    f"{LAYER}.lora_B.default.weight": f"{LAYER}.lora_B.weight",
    f"{LAYER}.lora_B.default.bias": f"{LAYER}.lora_B.bias",
    f"{LAYER}.lora_magnitude_vector.default.weight": f"{LAYER}.lora_magnitude_vector",
    "base_model.model.embed.lora_embedding_A.default": "base_model.model.embed.lora_embedding_A",
    "base_model.model.head.modules_to_save.default.weight": "base_model.model.head.weight",
    "base_model.model.head.original_module.weight": None,
    "base_model.model.norm.weight": None,
}


def _state(names):
    return {name: torch.full((3,), float(number)) for number, name in enumerate(names)}


@pytest.fixture
def config(tmp_path):
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4}))
    return folder


@pytest.mark.parametrize("key", ["model", "adapter.inner", None])
def test_the_adapter_is_taken_from_wherever_it_lies(key, config, tmp_path):
    model = _state(STORED)
    state = model
    for part in reversed(key.split(".")) if key else ():
        state = {part: state}
    slots = {name: {"exp_avg": torch.zeros(3)} for name in model}
    save({**state, "optimizer": {"state": slots, "param_groups": [{"lr": 1.0}]}}, tmp_path / "in")
    done = convert(tmp_path / "in", tmp_path / "out", "peft", config_from=config, **SMALL)
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert set(found) == {new for new in STORED.values() if new}
    for name, new in STORED.items():
        if new:
            assert torch.equal(found[new], model[name])
    assert done.tensors == len(found)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_bytes()) == {"r": 4}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
    }


def test_the_configuration_in_the_checkpoint_is_taken(tmp_path):
    """Of what the Trainer has saved, too, of which "hf" takes the optimizer."""
    files = {"rank-0": {"adapter_config.json": b'{"r": 8}', "trainer_state.json": b"{}"}}
    optimizer = {"state": {}, "param_groups": [{"lr": 1.0}]}
    state = {"model": _state(STORED), "optimizer": optimizer, "files": files}
    save(state, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", "peft", **SMALL)
    assert (tmp_path / "out" / "adapter_config.json").read_bytes() == b'{"r": 8}'
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_one_of_several_adapters_is_chosen(config, tmp_path):
    names = [f"{LAYER}.lora_A.{adapter}.weight" for adapter in ("first", "second")]
    save({"model": _state(names)}, tmp_path / "in")
    options = {"config_from": config, **SMALL}
    with pytest.raises(ConfigurationError, match=r"2 adapters: first, second; .*only='\*\.first"):
        convert(tmp_path / "in", tmp_path / "out", "peft", **options)
    convert(tmp_path / "in", tmp_path / "out", "peft", only="*.second*", **options)
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found[f"{LAYER}.lora_A.weight"].tolist() == [1.0] * 3


def test_several_models_with_adapters_are_refused(config, tmp_path):
    model = _state([f"{LAYER}.lora_A.default.weight"])
    save({"actor": model, "critic": model}, tmp_path / "in")
    options = {"config_from": config, **SMALL}
    with pytest.raises(ConfigurationError, match=r"several models.*part"):
        convert(tmp_path / "in", tmp_path / "out", "peft", **options)
    assert convert(tmp_path / "in", tmp_path / "out", "peft", part="critic", **options).tensors == 1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
    ],
)
def test_an_adapter_with_more_is_refused(settings, named, config, tmp_path):
    (config / "adapter_config.json").write_text(json.dumps(settings))
    save({"model": _state(STORED)}, tmp_path / "in")
    with pytest.raises(ConfigurationError, match=named):
        convert(tmp_path / "in", tmp_path / "out", "peft", config_from=config, **SMALL)


def test_what_is_no_adapter_is_refused(config, tmp_path):
    save({"model": {"weight": torch.ones(3), "lora_A.weight": torch.ones(3)}}, tmp_path / "in")
    with pytest.raises(ConfigurationError, match="no parameters of a LoRA adapter"):
        convert(tmp_path / "in", tmp_path / "out", "peft", config_from=config, **SMALL)
    save({"model": _state(STORED)}, tmp_path / "good")
    with pytest.raises(ConfigurationError, match=r"no adapter_config\.json.*--config-from"):
        convert(tmp_path / "good", tmp_path / "out", "peft", **SMALL)
    with pytest.raises(ConfigurationError, match=r"has no adapter_config\.json"):
        convert(tmp_path / "good", tmp_path / "out", "peft", config_from=tmp_path, **SMALL)
    assert not (tmp_path / "out").exists()
