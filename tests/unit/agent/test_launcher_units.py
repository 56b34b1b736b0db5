"""Where the launcher's own cgroup is, as the kernel's files tell it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from peerload.launcher import containment as units
from tests.each import each

if TYPE_CHECKING:
    from pathlib import Path

V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = (
    "30 24 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    "31 24 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 24 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
)


@each(
    ("controller", "cgroup", "mountinfo", "own"),
    [
        (b"", "0::/user.slice/x.service\n", V2, "/sys/fs/cgroup/user.slice/x.service"),
        (b"", "0::/\n", V2, "/sys/fs/cgroup"),
        (b"", "5:memory:/a\n0::/b\n", HYBRID, "/sys/fs/cgroup/unified/b"),
        (b"memory", "5:memory:/a\n0::/b\n", HYBRID, "/sys/fs/cgroup/memory/a"),
        (b"memory", "0::/b\n", V2, ""),
        (b"", "0::/../elsewhere\n", V2, ""),
        (b"", "0::/box/in\n", "30 24 0:26 /box /cg rw - cgroup2 cgroup2 rw\n", "/cg/in"),
        (b"", "0::/other\n", "30 24 0:26 /box /cg rw - cgroup2 cgroup2 rw\n", ""),
        (b"", "0::/b\n", "30 24 0:26 / /c\\040g rw - cgroup2 cgroup2 rw\n", "/c g/b"),
        (b"", "0::/b\n", "30 24 0:26 / /proc rw - proc proc rw\n", ""),
        (b"", "", V2, ""),
    ],
)
def test_the_own_cgroup_is_found(
    monkeypatch: pytest.MonkeyPatch, controller: bytes, cgroup: str, mountinfo: str, own: str
) -> None:
    files = {"/proc/self/cgroup": cgroup.encode(), "/proc/self/mountinfo": mountinfo.encode()}
    monkeypatch.setattr(units, "read", files.__getitem__)
    assert units.own_cgroup(controller) == own


def test_a_kind_that_does_not_work_is_not_chosen_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A directory that is no cgroup: it can be made, but not entered."""
    (tmp_path / "cgroup.procs").touch()
    monkeypatch.setattr(units, "own_cgroup", lambda: str(tmp_path))
    assert units.cgroup_units("", "root") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cgroup.procs"]
    assert "cgroup2" in capfd.readouterr().err
