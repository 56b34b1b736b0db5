"""Dropping of privileges: how a child of a launcher that runs as root becomes another user for good, and verifies it.
Used in that child alone.

Everything is verified afterwards, since system calls that succeed but change less than they say have given away root
before.
"""

from __future__ import annotations

import os
import resource

from peerload.launcher.containment import read, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from peerload.launcher.system.accounts import LauncherAccount
    from peerload.launcher.system.syscalls import Syscalls

FILES_SOFT_MAX = 1024
"""Soft limit on open files of a task, as after a login."""
OOM_SCORE = 100
"""Tasks are killed before system services if memory runs out."""
HELPER_PROCESSES_MAX = 64
"""Bound on processes of a helper that acts for a guest."""
NONE = b"0" * 16


class DropFailed(Exception):
    """This process has more rights than it should have."""


def limit(account: LauncherAccount, processes_max: int) -> None:
    """Set limits: no core dumps, open files as after a login, and the processes of a guest, whose uid is its own.
    Raises OSError."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    soft = FILES_SOFT_MAX if hard == resource.RLIM_INFINITY else min(FILES_SOFT_MAX, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if account.is_guest:
        resource.setrlimit(resource.RLIMIT_NPROC, (processes_max, processes_max))
    try:
        write("/proc/self/oom_score_adj", b"%d" % OOM_SCORE)
    except OSError:  # it need not be writable
        return


def drop(account: LauncherAccount, kernel: Syscalls) -> None:
    """Become that account: all ids and groups, no capabilities now or later, no keys. Raises OSError, DropFailed."""
    kernel.join_new_keyring()
    os.setgroups(account.groups)
    if account.uid != 0:
        kernel.drop_bounding_set()
    os.setresgid(account.gid, account.gid, account.gid)
    os.setresuid(account.uid, account.uid, account.uid)
    if account.uid != 0:
        kernel.drop_capabilities()
    kernel.forbid_new_privileges()
    verify(account)


def verify(account: LauncherAccount) -> None:
    """Raises DropFailed unless this process is that account and nothing more, according to the kernel."""
    found: dict[bytes, list[bytes]] = {}
    for line in read("/proc/self/status").splitlines():
        heading, _, values = line.partition(b":")
        found[heading] = values.split()
    wanted: dict[bytes, list[bytes]] = {
        b"Uid": [b"%d" % account.uid] * 4,
        b"Gid": [b"%d" % account.gid] * 4,
        b"NoNewPrivs": [b"1"],
    }
    if account.uid != 0:
        wanted |= {name: [NONE] for name in (b"CapInh", b"CapPrm", b"CapEff", b"CapBnd", b"CapAmb")}
    for name, value in wanted.items():
        if found.get(name) != value:
            raise DropFailed(f"{name.decode()} is {found.get(name)} after the drop")
    if set(found.get(b"Groups", [])) != {b"%d" % gid for gid in account.groups}:
        raise DropFailed(f"its groups are {found.get(b'Groups')} after the drop")
    if account.uid != 0:
        try:
            os.setresuid(0, 0, 0)
        except PermissionError:
            return
        raise DropFailed("it could become root again")
