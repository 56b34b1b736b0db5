"""System calls that Python lacks: those by which a launcher that runs as root gives up rights. All take effect on the
calling process alone. Used by that launcher and its children; loading it costs a megabyte."""

from __future__ import annotations

import ctypes
import errno
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PR_SET_PDEATHSIG = 1
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
CLOSE_RANGE_CLOEXEC = 4
CAPABILITY_VERSION = 0x20080522
CAPABILITIES_MAX = 63
LAST_CAPABILITY = "/proc/sys/kernel/cap_last_cap"
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWNET = 0x00020000, 0x08000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_SLAVE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 19
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY = 1
KEYCTL_JOIN_SESSION_KEYRING = 1
SYS_KEYCTL = {"x86_64": 250, "aarch64": 219}
SYS_MOUNT_SETATTR = 442
"""This number is the same on all machines, as for all recent system calls."""


class Syscalls:
    """The C library, loaded once, before any process is made."""

    def __init__(self) -> None:
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        self._libc.mount.argtypes = (
            ctypes.c_char_p,
            ctypes.c_char_p,
            ctypes.c_char_p,
            ctypes.c_ulong,
            ctypes.c_char_p,
        )
        self._libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
        with open(LAST_CAPABILITY, encoding="ascii") as file:  # noqa: PTH123 -- pathlib costs the launcher a megabyte
            self._capabilities = range(min(int(file.read()), CAPABILITIES_MAX) + 1)

    def _check(self, result: int, what: str) -> None:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")

    def drop_bounding_set(self) -> None:
        """Empty the bounding set: neither we nor what we execute can get capabilities. Raises OSError."""
        for capability in self._capabilities:
            self._check(self._libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0), "bounding set")

    def drop_capabilities(self) -> None:
        """Drop all capabilities: permitted, inheritable and ambient. Raises OSError."""
        self._check(self._libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "ambient capabilities")
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
        none = (ctypes.c_uint32 * 6)()
        self._check(self._libc.capset(header, none), "capabilities")

    def forbid_new_privileges(self) -> None:
        """Set no_new_privs: set-user-id programs become plain ones. Raises OSError."""
        self._check(self._libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")

    def join_new_keyring(self) -> None:
        """Join a new session keyring, since other tasks could read keys in that of the launcher. Ignored where the
        kernel has no keys for us (ENOSYS, EPERM). Raises OSError."""
        number = SYS_KEYCTL.get(os.uname().machine)
        if number is None:
            return
        try:
            self._check(self._libc.syscall(number, KEYCTL_JOIN_SESSION_KEYRING, None), "keyring")
        except OSError as error:
            if error.errno not in {errno.ENOSYS, errno.EPERM}:
                raise

    def die_with_parent(self) -> None:
        """Get SIGKILL when the thread that has forked us ends. Dropping privileges resets it, so call it after that.
        Raises OSError."""
        self._check(self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "death signal")

    def close_on_exec(self, least: int) -> None:
        """Set close-on-exec on all descriptors from this number on. Raises OSError."""
        self._check(self._libc.close_range(least, 0xFFFFFFFF, CLOSE_RANGE_CLOEXEC), "close_range")

    def unshare(self, flags: int) -> None:
        """Unshare namespaces. Raises OSError."""
        self._check(self._libc.unshare(flags), "unshare")

    def mount(self, source: str, target: str, kind: str, flags: int, options: str = "") -> None:
        """Mount a file system. Raises OSError."""
        raw = [os.fsencode(text) if text else None for text in (source, target, kind, options)]
        self._check(self._libc.mount(raw[0], raw[1], raw[2], flags, raw[3]), f"mount {target}")

    def unmount(self, path: str) -> None:
        """Unmount what is mounted here, if anything is. Raises OSError."""
        if self._libc.umount2(os.fsencode(path), MNT_DETACH) < 0 and ctypes.get_errno() not in {
            errno.EINVAL,
            errno.EPERM,
        }:
            self._check(-1, f"unmount {path}")

    def make_read_only(self, path: str) -> None:
        """Make a mount and all below it read-only. Raises OSError (ENOSYS before Linux 5.12)."""
        attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
        result = self._libc.syscall(
            SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), AT_RECURSIVE, attributes, ctypes.sizeof(attributes)
        )
        self._check(result, f"read-only {path}")

    def install_seccomp(self, program: bytes) -> None:
        """Install a seccomp program of `struct sock_filter`. Raises OSError."""
        buffer = ctypes.create_string_buffer(program, len(program))
        fprog = _Program(len(program) // 8, ctypes.addressof(buffer))
        self._check(self._libc.prctl(22, 2, ctypes.addressof(fprog), 0, 0), "seccomp")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))
