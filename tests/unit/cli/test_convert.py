"""``dcp-datastates convert`` and ``dcp-datastates diff``."""

import io
import json
import re
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support.commands import Terminal, run_cli
from support.state.checkpoints import assert_same, save
from support.state.files import data_files, flip_bit
from support.state.states import filled

from dcp_datastates.process.progress_bar import progress_bar
from dcp_datastates_cli.main import main

MODEL = {"a.weight": filled((40, 30), torch.float32, 1), "b": torch.ones(3)}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in"
    save({"model": MODEL, "step": 3}, path)
    return path


def test_a_part_of_a_state_becomes_a_folder_of_weights(source, tmp_path):
    ended = run_cli("convert", source, tmp_path / "out", "--to", "hf", "--part", "model")
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert "no config.json" in line, "no progress bar where there is no terminal"
    assert ended.stdout.startswith(
        f"{tmp_path / 'out'}: 2 tensors and 0 objects from dcp_datastates"
    )
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), MODEL)
    assert run_cli("diff", source, tmp_path / "out", "--rename", "model.=", "--only", "a",
                   "--only", "b").returncode == 0  # fmt: skip


def test_options_reach_the_conversion(source, tmp_path):
    ended = run_cli(
        "convert", source, tmp_path / "out", "--to", "hf", "--only", "model", "--exclude", "model.b",
        "--rename", "model.=net.", "--dtype", "bfloat16", "--shard-size", "1KB", "--threads", "1",
        "--json",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    seconds = document.pop("seconds")
    assert seconds > 0
    assert document == {
        "path": str(tmp_path / "out"), "source_format": "dcp_datastates", "target_format": "hf",
        "files": 1, "tensors": 1, "objects": 0, "nbytes": 2400, "skipped": [],
    }  # fmt: skip
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert_same(found, {"net.a.weight": MODEL["a.weight"].bfloat16()})


def test_objects_left_out_are_said(source, tmp_path):
    ended = run_cli("convert", source, tmp_path / "out", "--to", "safetensors", "--quiet")
    assert (ended.returncode, ended.stdout) == (0, "")
    (line,) = ended.stderr.splitlines()
    assert "1 Python object cannot be stored" in line
    strict = run_cli("convert", source, tmp_path / "no", "--to", "safetensors", "--strict")
    assert strict.returncode == 2
    assert not (tmp_path / "no").exists()


def test_damage_is_status_1_and_leaves_nothing(source, tmp_path):
    flip_bit(data_files(source)[0], 5000)
    ended = run_cli("convert", source, tmp_path / "out", "--to", "dcp")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "'model.a.weight'" in ended.stderr
    assert not (tmp_path / "out").exists()
    assert run_cli("diff", source, source).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("convert nowhere out", "nowhere"),
        ("convert in out", "--to"),
        ("convert in out --to gguf", "gguf"),
        ("convert in in --to hf", "is the source"),
        ("convert in out --to hf --rename model", "OLD=NEW"),
        ("convert in out --to hf --rename a=b --rename a=c", "twice"),
        ("convert in out --to hf --dtype int3", "int3"),
        ("convert in out --to hf --only modle", "did you mean 'model'"),
        ("convert in out --to torch --shard-size x", "shard_size='x'"),
        ("diff in nowhere", "nowhere"),
        ("diff in", "required"),
        ("diff in in --only x", "'x'"),
    ],
)
def test_what_cannot_work_is_status_2(arguments, words, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = run_cli(*arguments.split())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "out").exists()


def test_an_existing_destination_is_replaced_with_overwrite(source, tmp_path):
    assert run_cli("convert", source, tmp_path / "out", "--to", "torch").returncode == 0
    ended = run_cli("convert", source, tmp_path / "out", "--to", "torch")
    assert ended.returncode == 2
    assert "--overwrite" in ended.stderr
    assert (
        run_cli("convert", source, tmp_path / "out", "--to", "torch", "--overwrite").returncode == 0
    )


@pytest.mark.parametrize("command", ["convert", "diff", "copy", "verify"])
def test_progress_is_shown_on_a_terminal_and_not_in_a_pipe(command, source, tmp_path):
    shown = []
    for number, stream in enumerate((Terminal(), io.StringIO())):
        out = tmp_path / f"out-{number}"
        doing, *arguments = {
            "convert": ("converting in", source, out, "--to", "dcp"),
            "diff": ("comparing in", source, source),
            "copy": ("copying in", source, out),
            "verify": ("verifying in", source),
        }[command]
        with mock.patch("sys.stderr", stream):
            assert main([command, *map(str, arguments)]) == 0
        shown.append(stream.getvalue())
    assert shown[1] == ""
    assert doing in shown[0]
    assert "0:00:00" in shown[0]


def test_the_bar_has_the_rate_and_the_time_left():
    with (
        mock.patch("sys.stderr", Terminal()) as terminal,
        mock.patch("rich.console.monotonic") as now,
    ):
        now.return_value = 0.0
        with progress_bar("copying", "step-1", False) as progress:
            for part in range(6):
                now.return_value = float(part)
                progress(part * 10_000_000, 100_000_000)
    assert re.search(r"10\.0 MB/s\S* \S*0:00:05", terminal.getvalue())


def test_diff_says_what_differs_with_status_1(source, tmp_path):
    changed = {"a.weight": MODEL["a.weight"], "b": torch.tensor([1.0, 1.5, 1.0])}
    save({"model": changed, "step": 3}, tmp_path / "other")
    ended = run_cli("diff", source, tmp_path / "other")
    assert (ended.returncode, ended.stderr) == (1, "")
    first, second, line = ended.stdout.splitlines()
    assert first == f"{source} and {tmp_path / 'other'}: 1 name differs"
    assert second.startswith("  compared 2 tensors and 1 object, ")
    assert line == (
        "  model.b: values differ; 1 of 3 elements, largest difference 0.5 (relative 0.333)"
    )
    quiet = run_cli("diff", source, tmp_path / "other", "--quiet")
    assert quiet.stdout == f"{line.strip()}\n"
    same = run_cli("diff", source, source, "--quiet")
    assert (same.returncode, same.stdout, same.stderr) == (0, "", "")


def test_diff_as_json(source, tmp_path):
    save({"model": {"b": torch.tensor([1.0, float("nan"), 1.0])}}, tmp_path / "other")
    ended = run_cli("diff", source, tmp_path / "other", "--json", "--only", "model")
    assert ended.returncode == 1
    document = json.loads(ended.stdout, parse_constant=pytest.fail)
    assert document["same"] is False
    assert document["tensors"] == 1
    gone, values = document["differences"]
    assert (gone["name"], gone["problem"], gone["b"]) == ("model.a.weight", "only in a", None)
    assert values == {
        "name": "model.b", "problem": "values", "a": "float32 [3]", "b": "float32 [3]", "elements": 3,
        "differing": 1, "largest": "inf", "relative": "inf", "nans": 1,
    }  # fmt: skip
