"""Save and load a checkpoint, and run the command line, with what is installed: no tests, no source tree."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import dcp_datastates


def command(*arguments: object) -> str:
    """What the installed ``dcp-datastates`` prints."""
    program = Path(sysconfig.get_path("scripts"), "dcp-datastates")
    return subprocess.run(
        [program, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def main() -> None:
    installed = Path(sysconfig.get_path("platlib")).resolve()
    assert Path(dcp_datastates.__file__).resolve().is_relative_to(installed), (
        dcp_datastates.__file__
    )
    assert dcp_datastates.__version__ == version("dcp_datastates")

    model = torch.nn.Linear(300, 400)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 300)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step-7")
        writer = dcp_datastates.DataStatesWriter(path, host_cache_size="64MiB")
        dcp.save(state, storage_writer=writer, no_dist=True)
        template = {"weight": torch.zeros(400, 300), "bias": torch.zeros(400)}
        loaded = {"model": template, "step": 0}
        reader = dcp_datastates.DataStatesReader(path)
        dcp.load(loaded, storage_reader=reader, no_dist=True)
        assert torch.equal(template["weight"], model.weight)
        assert torch.equal(template["bias"], model.bias)
        assert loaded["step"] == 7
        assert json.loads(command("verify", "--json", path))["whole"]
        assert "float32" in command("inspect", path)
        assert command("latest", folder).strip() == str(path)
    assert "retain" in command("--help")
    print(
        f"saved, loaded, verified: dcp_datastates {version('dcp_datastates')}, torch {torch.__version__}, "
        f"Python {sys.version.split()[0]}"
    )


main()
