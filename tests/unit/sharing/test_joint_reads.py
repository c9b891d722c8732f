"""By default ranks share reads of object stores and of network file systems."""

import os

import pytest

from dcp_datastates.sharing.joint_reads import pays
from dcp_datastates.storage.object_path import locate


@pytest.mark.parametrize("url", ["s3://bucket/run/c", "gs://b/c", "ram://run/c", "memory://c"])
def test_object_stores_but_for_those_in_memory(url):
    assert pays(locate(url)) is url.startswith(("s3", "gs"))


def _mounts(tmp_path, kind, device):
    of_path = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"20 1 0:999 / /elsewhere rw shared:1 - nfs4 host:/x rw\n"
        f"21 1 {of_path} / {tmp_path} rw,relatime - {kind} host:/export rw,vers=4.2\n"
    )
    return mounts


_ON_OTHER_MACHINES = ["nfs4", "nfs", "lustre", "cifs", "fuse.s3fs", "gpfs", "ceph", "beegfs"]
_LOCAL = ["ext4", "xfs", "tmpfs", "fuseblk", "overlay"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [*((kind, True) for kind in _ON_OTHER_MACHINES), *((kind, False) for kind in _LOCAL)],
)
def test_file_systems_by_the_type_of_their_mount(tmp_path, kind, expected):
    mounts = _mounts(tmp_path, kind, tmp_path.stat().st_dev)
    assert pays(tmp_path, mounts) is expected


def test_what_is_not_known_counts_as_local(tmp_path):
    assert pays(tmp_path, tmp_path / "no such file") is False
    assert pays(tmp_path / "no such place", _mounts(tmp_path, "nfs", 1)) is False
    (tmp_path / "mountinfo").write_text("nonsense\n\n1 2 3\n")
    assert pays(tmp_path, tmp_path / "mountinfo") is False
