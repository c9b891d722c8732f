from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.devices.fake_cuda import FakeCuda, installed


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    """The fake driver. No test may call it in a thread that holds the GIL: the driver may keep it waiting."""
    with installed() as fake:
        yield fake
        assert fake.count("held_interpreter") == 0
