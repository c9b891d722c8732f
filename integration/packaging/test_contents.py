"""What is published has the right tag, holds what it needs and no more, and requires only what is imported."""

from __future__ import annotations

import email
import io
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path, PurePosixPath

import pytest
from elftools.elf.elffile import ELFFile
from packaging.requirements import Requirement
from packaging.utils import parse_sdist_filename, parse_wheel_filename

PACKAGES = ("dcp_datastates", "dcp_datastates_cli")

SYSTEM_LIBRARY = re.compile(r"(libc|libm|libpthread|libdl|librt|libgcc_s|ld-linux-[\w-]+)\.so\.\d+")


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    return email.message_from_bytes(_read(wheel, "METADATA"))


def _read(wheel: Path, end: str) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(end))
        return archive.read(name)


def test_the_tag_is_for_this_python_and_for_any_recent_linux(wheel: Path) -> None:
    _, _, _, tags = parse_wheel_filename(wheel.name)
    assert {tag.interpreter for tag in tags} == {f"cp3{sys.version_info.minor}"}
    assert all(tag.platform.startswith("manylinux") for tag in tags), wheel.name


def test_the_native_module_needs_nothing_but_the_c_library(names: set[str], wheel: Path) -> None:
    (module,) = (name for name in names if name.endswith(".so"))
    assert module.startswith("dcp_datastates/_native.")
    dynamic = ELFFile(io.BytesIO(_read(wheel, ".so"))).get_section_by_name(".dynamic")
    needed = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    assert not {name for name in needed if not SYSTEM_LIBRARY.fullmatch(name)}
    assert not {name for name in names if ".libs/" in name}, "no library is copied into the wheel"


def test_the_wheel_holds_the_two_packages_whole_and_nothing_else(
    names: set[str], repository: Path
) -> None:
    expected = {
        path.relative_to(repository).as_posix()
        for package in PACKAGES
        for path in (repository / package).rglob("*")
        if path.suffix in (".py", ".pyi") or path.name == "py.typed"
    }
    assert "dcp_datastates/_native.pyi" in expected
    held = {name for name in names if not PurePosixPath(name).parts[0].endswith(".dist-info")}
    assert {name for name in held if not name.endswith(".so")} == expected


def test_the_license_and_the_command_come_along(names: set[str], wheel: Path) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert b"dcp-datastates = dcp_datastates_cli.main:main" in _read(wheel, "entry_points.txt")


def test_nothing_is_required_but_what_is_imported(metadata: Message) -> None:
    required = {
        requirement.name
        for requirement in map(Requirement, metadata.get_all("Requires-Dist"))
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }
    assert required == {"torch", "numpy", "rich", "typing_extensions"}
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_sdist_has_all_that_a_build_needs_and_nothing_that_was_built(
    sdist: Path, wheel: Path, repository: Path
) -> None:
    name, version = parse_sdist_filename(sdist.name)
    assert (name, version) == parse_wheel_filename(wheel.name)[:2]
    with tarfile.open(sdist) as archive:
        held = {
            PurePosixPath(*PurePosixPath(member.name).parts[1:]).as_posix()
            for member in archive.getmembers()
            if member.isfile()
        }
    sources = [*PACKAGES, "native"]
    needed = {
        path.relative_to(repository).as_posix()
        for folder in sources
        for path in (repository / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    assert needed | {"pyproject.toml", "README.md", "LICENSE", "constraints.txt"} <= held
    built = (".so", ".o", ".pyc", ".whl")
    assert not {
        path
        for path in held
        if path.endswith(built) or path.startswith(("build/", "dist/", ".venv/", ".git/", ".ci/"))
    }


def test_a_build_without_a_compiler_says_what_is_missing(repository: Path, tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
            *("--config-settings", f"build-dir={tmp_path / 'build'}"),
            *("--wheel-dir", str(tmp_path), str(repository)),
        ],
        env={**os.environ, "CXX": "/bin/false"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode != 0
    assert "needs a C++20 compiler" in ended.stdout
