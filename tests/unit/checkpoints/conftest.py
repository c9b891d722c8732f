import pytest
from support.state.roots import make_root


@pytest.fixture
def root(tmp_path):
    """Three checkpoints, saved in the order of their names; and things that are none."""
    return make_root(tmp_path / "ckpt")
