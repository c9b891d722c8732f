"""Options of ``ram://`` stores, and a process alone."""

import pytest
import torch
from support.jobs.scripts import run_script

import dcp_datastates
from dcp_datastates import configure_nodes
from dcp_datastates.errors import ConfigurationError


@pytest.mark.parametrize(
    "options",
    [
        *({"peers": each} for each in (-1, True, "2")),
        *({"memory": each} for each in ("much", 0)),
        *({"rate": each} for each in ("fast", 0)),
        *({"node": each} for each in ("", 3)),
        *({"directory": 3}, {"sync": 1}),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(options):
    (name,) = options
    with pytest.raises(ConfigurationError, match=rf"\b{name}="):
        configure_nodes(**options)


@pytest.mark.parametrize("by", ["its URL", "a directory", "memory"])
def test_a_process_alone_uses_its_node(by, tmp_path):
    root = {"its URL": f"node://{tmp_path}/nodes/run", "memory": "ram://run"}.get(by, "node:///run")
    ended = run_script(
        f"""
        from pathlib import Path
        import dcp_datastates
        from dcp_datastates import configure_nodes
        from dcp_datastates.errors import ConfigurationError
        from dcp_datastates.tiers import nodes
        nodes.MEMORY = Path(path)
        options = dict(rate="1GB/s", memory="1GiB", directory={by == "a directory"} and path or None)
        configure_nodes(**options)
        dcp_datastates.save({{"w": torch.full((5,), 3.0)}}, "{root}/step-1")
        place = dcp_datastates.latest("{root}")
        assert str(place) == "{root}/step-1", place
        assert dcp_datastates.load(place)["w"].tolist() == [3.0] * 5
        assert dcp_datastates.verify(place).whole
        file, = dcp_datastates.inspect(place).files
        assert file.nodes == (os.uname().nodename,), file
        assert file.nodes[0] in str(dcp_datastates.inspect(place))
        files = [each.name for each in Path(path).rglob("*") if each.is_file()]
        assert "r00000-0.safetensors" in files and "decision" in files, files
        configure_nodes(**options)
        try:
            configure_nodes(peers=2)
        except ConfigurationError as error:
            assert "comes too late" in str(error)
        else:
            raise AssertionError
        dcp_datastates.delete(place)
        """,
        tmp_path / "nodes",
    )
    ended.assert_clean()
    left = [path.name for path in (tmp_path / "nodes").rglob("*") if path.is_file()]
    assert "safetensors" not in str(left), left
    assert (tmp_path / "nodes").stat().st_mode & 0o777 == 0o700


def test_a_url_of_a_disk_names_a_directory():
    with pytest.raises(ConfigurationError, match="names no directory; write node:///nvme/"):
        dcp_datastates.latest("node://nvme/run")


@pytest.mark.parametrize("root", ["ram://.hidden", "node:///.hidden"])
def test_a_name_with_a_dot_before_it_is_refused(root):
    with pytest.raises(ConfigurationError, match="begins with a dot"):
        dcp_datastates.save({"w": torch.zeros(1)}, f"{root}/step-1")
