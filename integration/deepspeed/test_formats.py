"""DeepSpeed's own tools on exported checkpoints: their results equal those on DeepSpeed's own checkpoints."""

from __future__ import annotations

import argparse
import collections
import pickle
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import dcp_datastates
from conftest import Trained
from dcp_datastates.deepspeed import export
from dcp_datastates.deepspeed.__main__ import main
from dcp_datastates.deepspeed.files import pack, unpack
from dcp_datastates.errors import ConfigurationError, ForeignCheckpointError
from deepspeed_jobs import run

TAG = "global_step3"
ZERO = (1, 2, 3)


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """The places where two values differ, in type or content."""
    if type(one) is not type(other):
        return [f"{where}: {type(one)} and {type(other)}"]
    if isinstance(one, torch.Tensor):
        same = (
            torch.equal(one, other)
            and one.dtype == other.dtype
            and one.requires_grad == other.requires_grad
        )
        return [] if same else [f"{where}: {one} and {other}"]
    if isinstance(one, dict):
        if list(one) != list(other):
            return [f"{where}: {list(one)} and {list(other)}"]
        return [each for key in one for each in differences(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{where}: {one} and {other}"]
        pairs = enumerate(zip(one, other, strict=True))
        return [each for at, pair in pairs for each in differences(*pair, f"{where}.{at}")]
    if hasattr(one, "__dict__") and not isinstance(one, Enum):
        return differences(vars(one), vars(other), where)
    return [] if one == other else [f"{where}: {one} and {other}"]


def files_differ(one: Path, other: Path) -> list[str]:
    """The differences of all files of torch's in two directories, but for DeepSpeed's configuration."""
    names = [
        sorted(str(path.relative_to(root)) for path in root.rglob("*.pt")) for root in (one, other)
    ]
    assert names[0] == names[1]
    assert names[0]
    found = []
    for name in names[0]:
        values = [torch.load(root / name, weights_only=False) for root in (one, other)]
        for value in values:
            if isinstance(value, dict):
                value.pop("ds_config", None)
        found += differences(*values, name)
    return found


@pytest.fixture(scope="module")
def exported(trained: Trained) -> Path:
    """The directory ``exported`` in the job's, with a directory for each stage."""
    for stage in (0, *ZERO):
        export(trained.root / "ours" / str(stage), trained.root / "exported" / str(stage))
    return trained.root / "exported"


@pytest.mark.parametrize("stage", [0, *ZERO])
def test_exported_files_equal_deepspeeds_own(trained: Trained, exported: Path, stage: int) -> None:
    """So a save holds the state at the call, though steps followed at once."""
    stock = trained.root / "stock" / str(stage)
    assert files_differ(exported / str(stage) / TAG, stock / TAG) == []
    assert (exported / str(stage) / "latest").read_text() == (stock / "latest").read_text()


@pytest.mark.parametrize("stage", ZERO)
def test_zero_to_fp32_of_an_exported_checkpoint(
    trained: Trained, exported: Path, stage: int
) -> None:
    one = get_fp32_state_dict_from_zero_checkpoint(str(exported / str(stage)))
    other = get_fp32_state_dict_from_zero_checkpoint(str(trained.root / "stock" / str(stage)))
    assert differences(dict(one), dict(other)) == []
    assert "norm.running_mean" in one


def test_universal_checkpoints_load_on_another_number_of_ranks(
    trained: Trained, exported: Path
) -> None:
    for stage in (1, 3):
        for name in ("stock", "exported"):
            source = trained.root / name / str(stage)
            ds_to_universal.main(
                argparse.Namespace(
                    input_folder=str(source / TAG),
                    output_folder=str(source / "universal"),
                    num_extract_workers=1,
                    num_merge_workers=1,
                    keep_temp_folder=False,
                    strict=True,
                    inject_missing_state=True,
                )
            )
        universal = [
            trained.root / name / str(stage) / "universal" for name in ("stock", "exported")
        ]
        assert files_differ(*universal) == []
    (losses,) = run("universal", trained.root, world=1)
    for stage in (1, 3):
        assert losses[f"exported {stage}"] == losses[f"stock {stage}"]
        both = torch.tensor(trained.of(stage, "stock"))[:, 3:].mean(0)
        assert losses[f"exported {stage}"] == pytest.approx(both.tolist(), rel=1e-4)


def test_the_command_exports_a_tag(trained: Trained, exported: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dcp_datastates.deepspeed"]
    arguments = [str(trained.root / "ours" / "1"), str(tmp_path / "out"), "--tag", TAG]
    ended = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == str(tmp_path / "out" / TAG)
    assert files_differ(tmp_path / "out" / TAG, exported / "1" / TAG) == []


def test_the_command_says_what_is_wrong(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(trained.root / "ours" / "1"), str(tmp_path / "out"), "--tag", "none"]) == 1
    assert "error: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_is_not_exported_over_itself(trained: Trained) -> None:
    with pytest.raises(ConfigurationError, match="choose another one"):
        export(trained.root / "ours" / "1", trained.root / "ours" / "1")


def test_without_latest_a_tag_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="pass a tag"):
        export(tmp_path, tmp_path / "out")


def test_a_tool_that_opens_a_placeholder_is_told_what_to_do(trained: Trained) -> None:
    with pytest.raises(ForeignCheckpointError, match=r"python -m dcp_datastates\.deepspeed"):
        get_fp32_state_dict_from_zero_checkpoint(str(trained.root / "ours" / "1"))


def test_tensors_can_be_read_by_name_without_deepspeed(trained: Trained) -> None:
    name = "mp_rank_00_model_states.pt.tensors.module.first.weight"
    loaded = dcp_datastates.load(trained.root / "ours" / "1" / TAG, only=name)
    assert loaded["mp_rank_00_model_states.pt"]["tensors"]["module.first.weight"].shape == (512, 64)


def again(value: Any, map_location: Any = None) -> Any:
    """``value``, packed and unpacked."""
    return unpack(pack(value), map_location)


def test_a_file_keeps_types_and_sharing() -> None:
    tensor = torch.arange(4.0)
    state = {
        1: tensor,
        "1": tensor[1:].requires_grad_(),
        "ordered": collections.OrderedDict(b=[tensor, (tensor,)], a=None),
        "namespace": argparse.Namespace(weight=torch.nn.Parameter(tensor)),
        "sparse": torch.eye(2).to_sparse(),
        "complex": torch.zeros(2, dtype=torch.complex64).conj(),
        "shape": torch.Size([1]),
    }
    found = again(state)
    sparse = [each.pop("sparse").to_dense() for each in (state, found)]
    assert differences(found, state) == []
    assert differences(*sparse) == []
    assert found[1] is found["ordered"]["b"][0]
    assert type(found["namespace"].weight) is torch.nn.Parameter


def test_the_same_elements_are_stored_once_and_others_apart() -> None:
    tensor = torch.arange(4.0)
    packed = pack(
        {"a": tensor, "b": tensor[:], "c": tensor[1:], "d.e": tensor + 1, "d": {"e": tensor + 2}}
    )
    assert list(packed["tensors"]) == ["a", "c", "d.e", "d.e#3"]
    values = unpack(packed)
    assert [float(values[key][0]) for key in ("a", "b", "c", "d.e")] == [0, 0, 1, 1]
    assert float(values["d"]["e"][0]) == 2


def test_python_values_are_those_of_the_call() -> None:
    state: dict[str, Any] = {"list": [1]}
    packed = pack(state)
    state["list"].append(2)
    assert unpack(packed) == {"list": [1]}


@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.Tensor.clone])
def test_an_alias_of_assigned_data_is_kept(kind: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """ZeRO-3 does this when it gathers a parameter."""
    tensor = kind(torch.zeros(3))
    packed = pack({"it": tensor})
    tensor.data = torch.ones(0)
    assert unpack(packed)["it"].shape == (3,)


@pytest.mark.parametrize(
    ("map_location", "device"),
    [
        (None, "meta"),
        ("cpu", "cpu"),
        (torch.device("cpu"), "cpu"),
        ({"meta": "cpu"}, "cpu"),
        ({}, "meta"),
        (lambda storage, _: storage, "cpu"),
        (lambda *_: None, "meta"),
    ],
)
def test_map_location_means_what_it_means_to_torch(map_location: Any, device: str) -> None:
    packed = pack(torch.zeros(2))
    packed["structure"] = (
        packed["structure"].replace(b"cpu", b"meta").replace(b"\x8c\x03meta", b"\x8c\x04meta")
    )
    packed["structure"] = _without_frame(packed["structure"])
    assert unpack(packed, map_location).device.type == device


def _without_frame(data: bytes) -> bytes:
    """A pickle of protocol 4 whose length has changed, without the frame that tells the length."""
    assert data[2:3] == pickle.FRAME
    return data[:2] + data[11:]


def test_what_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pack({"function": lambda: None})
