"""Print the C++ sources that `make lint` shows to clang-tidy: those that changed within the last day.

A fresh clone does not know for which branch it was made, but what a branch commits or rebases before it lands is hardly
older than a day. A header is looked at in a source that includes it. Without the history of a day these are all
sources, as in `make tidy`, which is a part of `make test-thorough`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Set
from pathlib import Path

DAY = 86400

ROOT = Path(__file__).parents[1]


def changed_files(root: Path) -> set[str] | None:
    """The files that differ from what the last commit's predecessors were a day before it; None if there is no such."""
    try:
        last = int(_git(root, "log", "-1", "--format=%ct"))
        base = _git(root, "rev-list", "-1", f"--before={last - DAY}", "HEAD")
        return set(_git(root, "diff", "--name-only", base).splitlines()) if base else None
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def to_look_at(root: Path, changed: Set[str] | None) -> list[str]:
    """The sources below ``root`` that are to be looked at if these files changed (None: any may have)."""
    sources = {
        path.relative_to(root).as_posix(): path.read_text()
        for path in sorted((root / "native").rglob("*.cpp"))
    }
    if changed is None or ".clang-tidy" in changed:
        return list(sources)
    found = set(sources) & changed
    for header in changed:
        if header.startswith("native/") and header.endswith(".h"):
            found.add(_one_that_includes(Path(header), sources))
    return sorted(found - {""})


def _one_that_includes(header: Path, sources: dict[str, str]) -> str:
    """The source that the header belongs to, or else any that includes it; empty if no source does."""
    include = f'{header.name}"'
    those = [source for source, text in sources.items() if include in text]
    return min(those, key=lambda source: (Path(source).stem != header.stem, source), default="")


if __name__ == "__main__":
    sys.stdout.write(" ".join(to_look_at(ROOT, changed_files(ROOT))))
