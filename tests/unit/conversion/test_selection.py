"""Which values are taken, and under which names: ``only``, ``exclude``, ``part``, ``rename`` and ``dtype``."""

import pytest
import torch
from safetensors.torch import load_file
from support.state.checkpoints import CACHE, assert_same, raises, save

import dcp_datastates
from dcp_datastates import convert
from dcp_datastates.errors import ConfigurationError, IncompatibleStateError

from .conftest import SMALL


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("selection") / "in"
    one = torch.ones(2)
    model = {"norm.weight": one, "head.weight": 2 * one, "head.bias": 3 * one}
    save({"model": model, "ema": {"norm.weight": 4 * one}, "ids": torch.arange(3)}, path)
    return path


def _names(source, tmp_path, **options):
    convert(source, tmp_path / "out", "safetensors", **SMALL, **options)
    return sorted(load_file(tmp_path / "out"))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"only": "ids"}, ["ids"]),
        ({"only": ["ids", "model.head"]}, ["ids", "model.head.bias", "model.head.weight"]),
        ({"part": "model"}, ["head.bias", "head.weight", "norm.weight"]),
        ({"part": "model.head"}, ["bias", "weight"]),
        ({"part": "ids"}, ["ids"]),
        ({"part": "mod*"}, ["head.bias", "head.weight", "norm.weight"]),
        ({"part": "m*.head"}, ["bias", "weight"]),
        ({"part": "?ma"}, ["norm.weight"]),
        ({"part": "model", "exclude": "model.head"}, ["norm.weight"]),
        ({"only": "ema", "rename": {"ema.": ""}}, ["norm.weight"]),
        ({"only": "ema", "rename": {"em": "m"}}, ["ma.norm.weight"]),
        ({"part": "model", "rename": {"head": "lm_head", "": "model."}},
         ["lm_head.bias", "lm_head.weight", "model.norm.weight"]),
        ({"only": "ids", "rename": str.upper}, ["IDS"]),
    ],
)  # fmt: skip
def test_names(options, names, source, tmp_path):
    assert _names(source, tmp_path, **options) == names


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"only": "modle"}, IncompatibleStateError, "did you mean 'model'"),
        ({"only": ["model", "x"]}, IncompatibleStateError, "no 'x'"),
        ({"part": "head"}, IncompatibleStateError, r"'model\.head'"),
        ({"exclude": "x"}, IncompatibleStateError, "no 'x'"),
        ({"only": "ids", "exclude": "ids"}, ConfigurationError, "nothing is left"),
        ({"rename": {"x.": ""}}, ConfigurationError, r"rename='x\.'"),
        ({"rename": {"model.": "", "ema.": ""}}, ConfigurationError,
         r"'model\.norm\.weight' and 'ema\.norm\.weight' would both"),
        ({"rename": {"ids": ""}}, ConfigurationError, "names nothing"),
        ({"rename": lambda name: 3}, ConfigurationError, "names nothing"),
        ({"rename": "model"}, ConfigurationError, "rename='model'"),
        ({"rename": {"model": 3}}, ConfigurationError, "rename="),
        ({"only": "ids", "rename": {"ids": "__metadata__"}}, ConfigurationError, "reserves"),
        ({"only": 3}, ConfigurationError, "only=3"),
        ({"part": "model", "only": "model"}, ConfigurationError, "both choose"),
        ({"dtype": "int32"}, ConfigurationError, "dtype='int32'"),
        ({"dtype": "float33"}, ConfigurationError, "dtype='float33'"),
        ({"shard_size": "many"}, ConfigurationError, "shard_size='many'"),
        ({"shard_size": 0}, ConfigurationError, "shard_size=0"),
        ({"threads": 0}, ConfigurationError, "threads=0"),
        ({"strict": 1}, ConfigurationError, "strict=1"),
        ({"config_from": "."}, ConfigurationError, "only for to='hf'"),
        ({"shards": 3}, ConfigurationError, "no option 'shards'"),
        ({"exclud": "x"}, ConfigurationError, "no option 'exclud'; did you mean 'exclude'"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(options, kind, words, source, tmp_path):
    with pytest.raises(kind, match=words):
        convert(source, tmp_path / "out", "safetensors", **{**SMALL, **options})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def trained(tmp_path):
    """A model and its optimizer, as a loop has saved them."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    with dcp_datastates.CheckpointManager(
        tmp_path / "run", every=1, host_cache_size=CACHE
    ) as manager:
        manager.save(1, {"model": model, "optim": optimizer})
    return tmp_path / "run" / "step-1"


@pytest.mark.parametrize("to", ["hf", "safetensors"])
def test_the_state_of_an_optimizer_is_refused_in_a_format_for_models(to, trained, tmp_path):
    with pytest.raises(ConfigurationError, match=r"optimizer, 'optim'.*part='model'"):
        convert(trained, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()
    assert convert(trained, tmp_path / "a", to, part="model").tensors == 2
    assert convert(trained, tmp_path / "b", to, exclude="optim").tensors == 2
    assert convert(trained, tmp_path / "c", to, only="optim.state").tensors > 2  # asked for by name


def test_a_folder_without_the_models_configuration_is_said(trained, tmp_path, caplog):
    convert(trained, tmp_path / "a", "hf", part="model")
    assert "no config.json" in caplog.text
    caplog.clear()
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    convert(trained, tmp_path / "b", "hf", part="model", config_from=tmp_path / "base")
    assert "config.json" not in caplog.text


@pytest.mark.parametrize("short", ["bf16", "fp16", "fp32", "fp64"])
def test_dtypes_have_short_names(short, trained, tmp_path):
    convert(trained, tmp_path / "a", "torch", part="model", dtype=short)
    kind = {"bf": "bfloat", "fp": "float"}[short[:2]] + short[2:]
    assert torch.load(tmp_path / "a")["weight"].dtype == getattr(torch, kind)


def test_a_format_must_be_given_and_known(source, tmp_path):
    with pytest.raises(ConfigurationError, match="--to"):
        convert(source, tmp_path / "out")
    with pytest.raises(ConfigurationError, match="'gguf' is not a format"):
        convert(source, tmp_path / "out", "gguf")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"model": {"head.bias": 3}}),
        ({"rename": {"model.": ""}}, {"head.bias": 3}),
        ({"part": "model"}, {"head.bias": 3}),
        ({"rename": {"model.": "a.b."}}, {"a.b": {"head.bias": 3}}),
        ({"rename": {"model.head.": "x."}}, {"x.bias": 3}),
    ],
)
def test_the_nesting_follows_the_names(options, expected, source, tmp_path):
    given = options if "part" in options else {"only": "model.head.bias", **options}
    others = ["model.norm", "model.head.weight"] if "part" in options else []
    convert(source, tmp_path / "torch", "torch", exclude=others, **SMALL, **given)
    convert(source, tmp_path / "ours", "datastates", exclude=others, **SMALL, **given)

    def value(tree):
        return {
            key: value(each) if isinstance(each, dict) else each[0].item()
            for key, each in tree.items()
        }

    assert value(torch.load(tmp_path / "torch")) == expected
    assert value(dcp_datastates.load(tmp_path / "ours")) == expected


def test_lists_stay_lists(tmp_path):
    state = {"slots": [torch.ones(1), torch.zeros(2)], "groups": [{"lr": 1.0}, {"lr": 2.0}]}
    save(state, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", "torch", **SMALL)
    assert_same(torch.load(tmp_path / "out"), state)


@pytest.mark.parametrize("names", ["xy", "yx"])
@pytest.mark.parametrize("to", ["torch", "dcp", "datastates"])
def test_no_value_may_come_to_lie_in_another(to, names, tmp_path):
    values = {"y": {"z": torch.ones(2)}, "x": torch.zeros(3)}
    torch.save({name: values[name] for name in names}, tmp_path / "in")
    with raises(ConfigurationError, "one nested state"):
        convert(tmp_path / "in", tmp_path / "out", to, rename={"y.": "x."})
    assert not (tmp_path / "out").exists()
