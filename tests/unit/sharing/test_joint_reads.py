"""By default ranks share reads of object stores and of network file systems."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dcp_datastates.sharing.joint_reads import pays
from dcp_datastates.storage.object_path import locate


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/run/c", True),
        ("gs://b/c", True),
        ("ram://run/c", False),
        ("memory://c", False),
    ],
)
def test_object_stores_but_for_those_in_memory(url, expected):
    assert pays(locate(url)) is expected


def _mounts(tmp_path: Path, kind: str, device: int) -> Path:
    of_path = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"20 1 0:999 / /elsewhere rw shared:1 - nfs4 host:/x rw\n"
        f"21 1 {of_path} / {tmp_path} rw,relatime - {kind} host:/export rw,vers=4.2\n"
    )
    return mounts


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        *[("nfs4", True), ("nfs", True), ("lustre", True), ("cifs", True), ("fuse.s3fs", True)],
        *[("gpfs", True), ("ceph", True), ("beegfs", True)],
        *[
            ("ext4", False),
            ("xfs", False),
            ("tmpfs", False),
            ("fuseblk", False),
            ("overlay", False),
        ],
    ],
)
def test_file_systems_by_the_type_of_their_mount(tmp_path, kind, expected):
    mounts = _mounts(tmp_path, kind, tmp_path.stat().st_dev)
    assert pays(tmp_path, mounts) is expected


def test_what_is_not_known_counts_as_local(tmp_path):
    assert pays(tmp_path, tmp_path / "no such file") is False
    assert pays(tmp_path / "no such place", _mounts(tmp_path, "nfs", 1)) is False
    (tmp_path / "mountinfo").write_text("nonsense\n\n1 2 3\n")
    assert pays(tmp_path, tmp_path / "mountinfo") is False
