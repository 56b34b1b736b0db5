"""When two machines have the same directory."""

from __future__ import annotations

import os
from pathlib import Path

from peerload.agent.accounts import identity_in, identity_of, mount_point
from tests.each import each

ROOT = "22 1 8:1 / / rw - ext4 /dev/sda1 rw"
NFS = "30 22 0:40 / /home rw shared:9 - nfs4 fs1:/export/home rw,vers=4.2"
BOUND = "31 22 0:40 /ben /srv/b\\040en rw - nfs fs1:/export/home rw"
SSHFS = "32 22 0:50 / /mnt rw - fuse.sshfs localhost:/data rw"
TAG = "33 22 0:51 / /host rw - 9p share rw"


def identity(path: str, *lines: str, boot: str = "one") -> str:
    return identity_in("\n".join(lines).encode(), boot.encode(), path.encode())


def test_the_same_place_of_a_file_server_is_the_same_wherever_it_is_mounted() -> None:
    here = identity("/home/ben/x", ROOT, NFS)
    assert here == identity("/srv/b en/x", ROOT, BOUND, boot="two")
    assert here != identity("/home/ben/y", ROOT, NFS)
    assert here == identity("/home/ben/x", ROOT, NFS.replace("0:40", "0:77"), boot="two")
    assert here != identity("/home/ben/x", ROOT, NFS.replace("fs1", "fs2"))


@each(("path", "line"), [("/home/ben", ROOT), ("/mnt/x", SSHFS), ("/host/x", TAG)])
def test_what_names_nothing_beyond_its_machine_is_another_on_each(path: str, line: str) -> None:
    assert identity(path, ROOT, line) == identity(path, ROOT, line)
    assert identity(path, ROOT, line) != identity(path, ROOT, line, boot="two")


def test_of_two_mounts_at_one_place_the_later_one_counts() -> None:
    over = "40 30 8:9 / /home rw - xfs /dev/sdb rw"
    assert identity("/home/ben", ROOT, NFS, over) == identity("/home/ben", ROOT, over)
    assert identity("/homes", ROOT, NFS) == identity("/homes", ROOT)


def test_a_link_is_the_directory_that_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    first, second = (identity_of(os.fsencode(tmp_path / name)) for name in "ab")
    assert first == second != ""
    assert first != identity_of(os.fsencode(tmp_path))


def test_a_path_belongs_to_the_mount_point_above_it() -> None:
    assert mount_point(b"/proc/1/no such file") == b"/proc"
    assert mount_point(b"/") == b"/"
    assert mount_point(b"/no such directory/x") == b"/"
