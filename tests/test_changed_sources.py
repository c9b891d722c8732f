"""What `make lint` shows to clang-tidy."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "native" / "changed_sources.py"
FILES = {
    "src/a.cpp": '#include "files/b.h"',
    "src/b.cpp": '#include "files/b.h"',
    "src/b.h": "",
    "src/only_header.h": "",
    "tests/c_test.cpp": '#include "only_header.h"',
    "tests/unused.h": "",
}
SOURCES = ["native/src/a.cpp", "native/src/b.cpp", "native/tests/c_test.cpp"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("changed_sources", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "native" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "looked_at"),
    [
        ({"native/src/a.cpp", "README.md"}, SOURCES[:1]),
        ({"native/src/b.h"}, SOURCES[1:2]),
        ({"native/src/only_header.h", "native/src/a.cpp"}, [SOURCES[0], SOURCES[2]]),
        ({"native/tests/unused.h", "native/src/deleted.cpp"}, []),
        ({".clang-tidy"}, SOURCES),
        (None, SOURCES),
    ],
)
def test_what_changed_is_looked_at_and_a_header_by_a_source(script, root, changed, looked_at):
    assert script.to_look_at(root, changed) == looked_at


def test_without_a_history_nothing_is_known_of_changes(script, root):
    assert script.changed_files(root) is None
