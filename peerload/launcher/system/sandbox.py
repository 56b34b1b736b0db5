"""The sandbox of a guest: a read-only file system, temporary files of its own, no homes, no processes but its own, only
the devices that every program needs. The child that becomes the guest makes it as root.

Temporary files are in memory, bounded, and gone with the last process: nothing has to be removed.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct

from peerload.launcher.system.syscalls import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    MS_SLAVE,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from peerload.launcher.system.syscalls import Syscalls

TEMPORARY = "/tmp"  # noqa: S108 -- a fresh one
SCRATCH = TEMPORARY + "/scratch"
HIDDEN = (
    "/home",
    "/root",
    "/run/user",
    "/etc/peerload",
    "/run/peerload",
    "/run/peerload-launcher",
    "/var/lib/peerload",
    "/var/lib/peerload-launcher",
)
"""Homes, and peerload's own directories."""
_NODES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
    "ptmx": (5, 2),
}
_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
GPUS = ("nvidia", "dri", "kfd")
"""Names, or prefixes, of GPU devices in /dev."""


def enter(kernel: Syscalls, bytes_max: int, hidden: tuple[str, ...], *, has_devices: bool, staged: str = "") -> None:
    """Enter a sandbox with so many bytes of temporary files. hidden: further directories to hide. has_devices: it was
    given devices of this machine. staged: a directory with its files, which is SCRATCH there. Raises OSError."""
    kernel.unshare(CLONE_NEWNS | CLONE_NEWIPC)
    kernel.mount("", "/", "", MS_REC | MS_SLAVE)
    kernel.make_read_only("/")
    own = os.open(staged, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) if staged else -1
    covered = [path for path in dict.fromkeys((*HIDDEN, *hidden)) if os.path.isdir(path)]  # noqa: PTH112 -- as elsewhere here
    _devices(kernel, has_devices=has_devices)
    kernel.mount("tmpfs", TEMPORARY, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={bytes_max}")
    for path in ("/var/tmp", "/dev/shm"):  # noqa: S108 -- the same
        if os.path.isdir(path):  # noqa: PTH112
            kernel.mount(TEMPORARY, path, "", MS_BIND)
    if staged:
        os.mkdir(SCRATCH)  # noqa: PTH102 -- as elsewhere here
        kernel.mount(f"/proc/self/fd/{own}", SCRATCH, "", MS_BIND)
        kernel.mount("", SCRATCH, "", MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV)
        os.close(own)
    for path in covered:
        if os.path.isdir(path):  # noqa: PTH112 -- it may lie in one that is covered by now
            kernel.mount("tmpfs", path, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=000,size=4k")
    kernel.mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=2")


def isolate_network(kernel: Syscalls) -> None:
    """Enter a network namespace with a loopback interface only, without the machine's abstract sockets. The interface
    stays down where the launcher may not set one up. Raises OSError."""
    kernel.unshare(CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as any_socket:
        try:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
        except PermissionError:
            return


def _devices(kernel: Syscalls, *, has_devices: bool) -> None:
    """Make a /dev of its own. Terminals are those of the machine, of which it can open its own."""
    nodes = dict(_NODES)
    pts = os.open("/dev/pts", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    gpus = _found("/dev") if has_devices else []
    kernel.mount("tmpfs", "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=64k,nr_inodes=512")
    before = os.umask(0)
    try:
        for name, numbers in nodes.items():
            os.mknod(f"/dev/{name}", 0o666 | stat.S_IFCHR, os.makedev(*numbers))
        for path, status in gpus:
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)  # noqa: PTH103, PTH120
            os.mknod(path, status.st_mode, status.st_rdev)
            os.chown(path, status.st_uid, status.st_gid)
        for name, target in _LINKS.items():
            os.symlink(target, f"/dev/{name}")  # noqa: PTH211
        os.mkdir("/dev/pts", 0o755)  # noqa: PTH102
        os.mkdir("/dev/shm", 0o1777)  # noqa: PTH102, S108
    finally:
        os.umask(before)
    kernel.mount(f"/proc/self/fd/{pts}", "/dev/pts", "", MS_BIND)
    os.close(pts)
    kernel.mount("", "/dev", "", MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NOEXEC | MS_BIND)


def _found(directory: str) -> list[tuple[str, os.stat_result]]:
    """GPU devices, also in subdirectories."""
    found: list[tuple[str, os.stat_result]] = []
    for name in sorted(os.listdir(directory)):  # noqa: PTH208
        path = f"{directory}/{name}"
        if directory == "/dev" and not name.startswith(GPUS):
            continue
        status = os.lstat(path)
        if stat.S_ISCHR(status.st_mode):
            found.append((path, status))
        elif stat.S_ISDIR(status.st_mode):
            found += _found(path)
    return found
