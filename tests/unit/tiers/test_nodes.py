"""Options of ``ram://`` stores, and a process alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.jobs.scripts import run_script

import dcp_datastates
from dcp_datastates import ConfigurationError, configure_nodes


@pytest.mark.parametrize(
    "options",
    [
        {"peers": -1},
        {"peers": True},
        {"peers": "2"},
        {"memory": "much"},
        {"memory": 0},
        {"rate": "fast"},
        {"rate": 0},
        {"directory": 3},
        {"node": ""},
        {"node": 3},
    ],
)
def test_options_that_cannot_work_are_refused_by_name(options):
    (name,) = options
    with pytest.raises(ConfigurationError, match=rf"\b{name}="):
        configure_nodes(**options)


def test_a_process_alone_uses_its_node(tmp_path: Path):
    ended = run_script(
        """
        import dcp_datastates
        from dcp_datastates import ConfigurationError, configure_nodes
        configure_nodes(directory=path, rate="1GB/s", memory="1GiB")
        dcp_datastates.save({"w": torch.full((5,), 3.0)}, "node:///run/step-1")
        place = dcp_datastates.latest("node:///run")
        assert str(place) == "node:///run/step-1", place
        assert dcp_datastates.load(place)["w"].tolist() == [3.0] * 5
        assert dcp_datastates.verify("node:///run/step-1").whole
        configure_nodes(directory=path, rate="1GB/s", memory="1GiB")
        try:
            configure_nodes(peers=2)
        except ConfigurationError as error:
            assert "comes too late" in str(error)
        else:
            raise AssertionError
        dcp_datastates.delete("node:///run/step-1")
        """,
        tmp_path / "memory",
    )
    ended.assert_clean()
    left = [path.name for path in (tmp_path / "memory").rglob("*") if path.is_file()]
    assert "safetensors" not in str(left), left
    assert (tmp_path / "memory").stat().st_mode & 0o777 == 0o700


def test_a_name_with_a_dot_before_it_is_refused():
    with pytest.raises(ConfigurationError, match="begins with a dot"):
        dcp_datastates.save({"w": torch.zeros(1)}, "ram://.unfinished/step-1")
