from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fake_cuda import FakeCuda, installed


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with installed() as fake:
        yield fake
