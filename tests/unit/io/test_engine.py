"""The process's engine, and its options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dcp_datastates
from dcp_datastates import ConfigurationError, configure_engine
from dcp_datastates.io import engine as process_engine


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No engine yet; afterwards the default options again."""
    process_engine._shut_down()
    yield
    process_engine._shut_down()
    configure_engine()


def test_the_numbers_of_threads_are_the_chosen_ones(tmp_path: Path) -> None:
    configure_engine(copy_threads=3, flush_threads=1, restore_threads=2)
    state = {"w": torch.arange(100_000.0)}
    dcp_datastates.save(state, tmp_path / "a", no_dist=True)
    dcp_datastates.load(tmp_path / "a", no_dist=True)
    tasks = Path("/proc/self/task").iterdir()
    names = [(task / "comm").read_text().rstrip().rpartition("-")[0] for task in tasks]
    found = Counter(name for name in names if name.startswith("ds-"))
    assert found == {"ds-copy": 3, "ds-flush": 1, "ds-restore": 2}


def test_an_engine_that_exists_keeps_its_options() -> None:
    configure_engine(flush_threads=2)
    process_engine.engine()
    configure_engine(flush_threads=2)
    with pytest.raises(ConfigurationError, match="before the first writer"):
        configure_engine(flush_threads=3)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("copy_threads", 0, "copy_threads=0 must be an int between 1 and 256"),
        ("flush_threads", 257, "flush_threads=257 must be an int between 1 and 256"),
        ("restore_threads", "4", "restore_threads='4' must be an int"),
        ("copy_threads", True, "copy_threads=True must be an int"),
        ("copy_rate", "fast", "copy_rate='fast' is not a size"),
        ("copy_rate", 1000, "copy_rate=1000 is below the minimum of 64MiB per second"),
        ("copy_rate", 0, "or None for no limit"),
    ],
)
def test_an_option_that_cannot_work_is_refused(option: str, value: object, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        configure_engine(**{option: value})  # type: ignore[arg-type]
