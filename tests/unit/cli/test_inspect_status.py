"""``inspect``: its exit status for damage, lines in a pipe, and what it says of other programs' files."""

import json

import pytest
import torch
from safetensors.torch import save_file
from support.commands import run_cli
from support.state.checkpoints import save
from support.state.files import data_files, flip_bit
from support.state.metadata import decision_of


@pytest.fixture
def run(tmp_path):
    for step in (1, 2):
        save({"w": torch.ones(100)}, tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


def test_damage_has_an_exit_status_of_its_own(run):
    assert run_cli("inspect", run).returncode == 0
    assert run_cli("inspect", run / "step-1").returncode == 0
    data_files(run / "step-1")[0].unlink()
    for path in (run, run / "step-1"):
        assert run_cli("inspect", path).returncode == 1
        ended = run_cli("inspect", path, "--json")
        assert ended.returncode == 1
        json.loads(ended.stdout)
    assert run_cli("inspect", run / "step-2").returncode == 0
    flip_bit(decision_of(run / "step-2"), 40)
    ended = run_cli("inspect", run / "step-2")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "checksum" in ended.stderr
    ended = run_cli("inspect", run / "nowhere")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "nowhere" in ended.stderr


def test_another_programs_checkpoint_beside_it_is_no_damage(run):
    (run / "step-3").mkdir()
    (run / "step-3" / ".metadata").write_bytes(b"no pickle")
    assert run_cli("inspect", run).returncode == 0


def test_lines_in_a_pipe_have_no_blanks_at_their_ends(run):
    for arguments in ([run], [run / "step-1", "--tensors"]):
        out = run_cli("inspect", *arguments).stdout
        assert "step-1" in out
        assert not [line for line in out.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (
            ["config.json", "model.safetensors"],
            "safetensors files, such as Hugging Face's; dcp-datastates convert",
        ),
        (["adapter_config.json", "adapter_model.safetensors"], "PEFT"),
        (["pytorch_model.bin", "config.json"], "Hugging Face"),
        (["global_step3/", "latest"], "DeepSpeed"),
        (["mp_rank_00_model_states.pt"], "DeepSpeed"),
        (["anything"], "1 other entries, such as 'anything'"),
    ],
)
def test_a_folder_of_another_program_is_named(names, what, tmp_path):
    for name in names:
        path = tmp_path / "there" / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()
    for command in ("inspect", "verify"):
        ended = run_cli(command, tmp_path / "there")
        assert ended.returncode == 2
        assert what in ended.stderr


def test_a_file_of_another_program_is_named(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "w.safetensors")
    ended = run_cli("inspect", tmp_path / "w.safetensors")
    assert ended.returncode == 2
    assert "a safetensors file; dcp-datastates convert" in ended.stderr
