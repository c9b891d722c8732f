"""``diff``: what two checkpoints differ in, whatever their formats and however their tensors are sharded."""

import math

import pytest
import torch
from safetensors.torch import save_file
from support.state.checkpoints import save
from support.state.chunks import boxes, save_by_ranks
from support.state.files import data_files, flip_bit
from support.state.states import Opinion, filled

from dcp_datastates import diff
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
    IncompatibleStateError,
)

NAN, INF = math.nan, math.inf


def _diff(a, b, tmp_path, **options):
    """Of two states of tensors."""
    torch.save(a, tmp_path / "a")
    torch.save(b, tmp_path / "b")
    return diff(tmp_path / "a", tmp_path / "b", **options)


def _one(a, b, tmp_path):
    (found,) = _diff({"x": a}, {"x": b}, tmp_path).differences
    return found


@pytest.mark.parametrize("one", ["datastates", "dcp", "torch"])
@pytest.mark.parametrize("other", ["datastates", "dcp", "torch"])
def test_formats_do_not_matter(one, other, sources):
    found = diff(sources[one], sources[other])
    assert found.same
    assert found.differences == ()
    assert (found.tensors, found.objects) == (12, 4)


def test_shards_do_not_matter(tmp_path):
    tensor = filled((700, 901), torch.float32)
    pieces = {"x": (tensor, boxes(tensor.shape, [(350,), (1, 500)]))}
    save_by_ranks(tmp_path / "a", [pieces])
    save({"x": tensor}, tmp_path / "b")
    assert diff(tmp_path / "a", tmp_path / "b").same
    tensor[699, 900] = 1
    save({"x": tensor}, tmp_path / "c")
    (found,) = diff(tmp_path / "a", tmp_path / "c", threads=2).differences
    assert (found.name, found.differing, found.elements) == ("x", 1, 700 * 901)


@pytest.mark.parametrize(
    ("a", "b", "differing", "largest", "relative", "nans"),
    [
        ([1.0, 2.0, 4.0], [1.0, 3.0, 4.0], 1, 1.0, 1 / 3, 0),
        ([1.0, 2.0], [-1.0, 2.5], 2, 2.0, 2.0, 0),
        ([NAN, 1.0], [NAN, 2.0], 1, 1.0, 0.5, 0),
        ([NAN, 1.0], [0.0, 1.0], 1, INF, INF, 1),
        ([INF, -INF, 1.0], [INF, -INF, 2.0], 1, 1.0, 0.5, 0),
        ([INF, 1.0], [-INF, 1.0], 1, INF, INF, 0),
        ([0.0, 1.0], [-0.0, 1.0], 1, 0.0, 0.0, 0),
    ],
)
def test_how_far_values_are_apart(a, b, differing, largest, relative, nans, tmp_path):
    found = _one(torch.tensor(a), torch.tensor(b), tmp_path)
    assert found.problem == "values"
    assert (found.differing, found.elements) == (differing, len(a))
    assert (found.largest, found.nans) == (largest, nans)
    assert found.relative == pytest.approx(relative)


def test_nans_with_other_bits_differ_without_a_distance(tmp_path):
    a = torch.tensor([0x7FC00000, 0], dtype=torch.int32).view(torch.float32)
    b = torch.tensor([0x7FC00001, 0], dtype=torch.int32).view(torch.float32)
    found = _one(a, b, tmp_path)
    assert (found.differing, found.largest, found.nans) == (1, 0.0, 0)


@pytest.mark.parametrize(
    ("dtype", "a", "b", "largest"),
    [
        (torch.int64, 2**60 + 1, 2**60, 1),
        (torch.int64, 2**63 - 1, -(2**63), 2.0**64),
        (torch.uint8, 255, 0, 255),
        (torch.bool, True, False, 1),
        (torch.bfloat16, 1.0, 1.5, 0.5),
        (torch.float8_e4m3fn, 1.0, 1.5, 0.5),
        (torch.complex64, 3j, 4.0, 5.0),
    ],
)
def test_dtypes(dtype, a, b, largest, tmp_path):
    found = _one(torch.tensor([a, a]).to(dtype), torch.tensor([b, a]).to(dtype), tmp_path)
    assert (found.differing, found.largest) == (1, largest)


def test_a_dtype_without_arithmetic_is_compared_by_bytes(tmp_path):
    name = next(n for n in ("float4_e2m1fn_x2", "uint1", "bits8") if hasattr(torch, n))
    dtype = getattr(torch, name)
    a = torch.tensor([1, 2, 3], dtype=torch.uint8)
    b = torch.tensor([1, 2, 4], dtype=torch.uint8)
    save({"x": a.view(dtype)}, tmp_path / "a")
    save({"x": b.view(dtype)}, tmp_path / "b")
    (found,) = diff(tmp_path / "a", tmp_path / "b").differences
    assert (found.differing, found.largest) == (1, None)
    assert "1 of 3" in str(found)


def test_another_dtype_is_a_difference_and_values_are_compared(tmp_path):
    values = torch.tensor([1.0, 2.0, 1.0009765625])
    found = _one(values, values.bfloat16(), tmp_path)
    assert (found.problem, found.a, found.b) == ("dtype", "float32 [3]", "bfloat16 [3]")
    assert (found.differing, found.largest) == (1, 1.0009765625 - 1)
    exact = _one(values[:2], values[:2].bfloat16(), tmp_path)
    assert (exact.differing, exact.largest) == (0, 0.0)


def test_strided_tensors_are_compared(tmp_path):
    a = {"x": torch.arange(6.0)[::2], "y": torch.ones(1).expand(3)}
    assert _diff(a, {"x": torch.tensor([0.0, 2.0, 4.0]), "y": torch.ones(3)}, tmp_path).same


def test_tensors_without_elements_differ_in_their_dtype_alone(tmp_path):
    found = _one(torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int64), tmp_path)
    assert (found.problem, found.differing, found.largest) == ("dtype", 0, 0.0)


def test_differences_come_worst_first(tmp_path):
    ones = torch.ones(3)
    a = {"near": ones, "far": ones, "shape": ones, "gone": ones, "kind": ones, "same": ones}
    b = {
        "near": ones + 0.1, "far": ones + 9, "shape": torch.ones(3, 1), "new": ones, "kind": 3,
        "same": ones.clone(),
    }  # fmt: skip
    found = _diff(a, b, tmp_path)
    assert [(each.name, each.problem) for each in found.differences] == [
        ("kind", "kind"),
        ("shape", "shape"),
        ("gone", "only in a"),
        ("new", "only in b"),
        ("far", "values"),
        ("near", "values"),
    ]
    assert not found.same
    said = str(found).splitlines()
    assert "6 names differ" in said[0]
    assert "shape differs: float32 [3], float32 [3, 1]" in said[3]


def test_large_and_many_tensors(tmp_path):
    """Larger than what a thread compares at a time, and many in one such piece."""
    a = {f"{n}": torch.full((n,), float(n)) for n in range(200)} | {"large": torch.zeros(1_000_003)}
    b = {name: each.clone() for name, each in a.items()}
    b["large"][1_000_002] = 5
    b["large"][3] = 7
    b["150"][149] = 0
    found = _diff(a, b, tmp_path, threads=3)
    assert [(each.name, each.differing, each.largest) for each in found.differences] == [
        ("150", 1, 150.0),
        ("large", 2, 7.0),
    ]


def test_keys_and_renamed_names(tmp_path):
    a = {"model": {"x": torch.ones(3), "y": torch.ones(2)}, "step": 1}
    b = {"x": torch.ones(3), "y": torch.zeros(2)}
    found = _diff(a, b, tmp_path, rename={"model.": ""}, only=["x", "y"])
    assert [each.name for each in found.differences] == ["y"]
    assert diff(tmp_path / "a", tmp_path / "b", rename={"model.": ""}, only="x").same
    with pytest.raises(IncompatibleStateError, match="'z'"):
        diff(tmp_path / "a", tmp_path / "b", only="z")
    with pytest.raises(ConfigurationError, match="rename"):
        diff(tmp_path / "a", tmp_path / "b", rename={"z": ""})


def test_objects_are_compared_as_values(tmp_path):
    a = {"same": {"lr": [1.0, NAN]}, "other": [1, 2], "tuple": (1, 2), "opinion": Opinion("x")}
    b = {"same": {"lr": [1.0, NAN]}, "other": [1, 3], "tuple": [1, 2], "opinion": Opinion("x")}
    save(a, tmp_path / "a")
    torch.save(b, tmp_path / "b")
    options = {"allow_objects": True}
    found = diff(tmp_path / "a", tmp_path / "b", **options)
    assert [(each.name, each.problem) for each in found.differences] == [
        ("other", "object"),
        ("tuple", "object"),
    ]


def test_unsafe_objects_are_compared_by_their_bytes(tmp_path):
    save({"o": Opinion("x")}, tmp_path / "a")
    save({"o": Opinion("x")}, tmp_path / "b")
    save({"o": Opinion("y")}, tmp_path / "c")
    assert diff(tmp_path / "a", tmp_path / "b").same
    assert not diff(tmp_path / "a", tmp_path / "c").same


def test_damage_is_an_error(tmp_path):
    save({"x": filled((3 << 20,), torch.uint8)}, tmp_path / "a")
    save_file({"x": filled((3 << 20,), torch.uint8)}, tmp_path / "b")
    assert diff(tmp_path / "a", tmp_path / "b").same
    flip_bit(data_files(tmp_path / "a")[0], 2 << 20)
    with pytest.raises(CheckpointCorruptError, match="'x'"):
        diff(tmp_path / "a", tmp_path / "b")
    with pytest.raises(CheckpointNotFoundError):
        diff(tmp_path / "b", tmp_path / "nowhere")


def test_progress_and_extent(tmp_path):
    told = []
    a = {"x": torch.zeros(5, dtype=torch.float64), "y": torch.zeros(1)}
    b = {"x": torch.zeros(5), "y": torch.zeros(2)}
    found = _diff(a, b, tmp_path, progress=lambda *each: told.append(each))
    assert told[-1] == (60, 60)
    assert (found.nbytes, found.tensors) == (60, 1)
