"""Confinement of the processes that a launcher of all users starts: how a child that is root permanently gives up its rights.

`enter` makes the sandbox of a guest: a read-only file system, its own temporary files, no home directories, only its own
processes, and only the devices that every program needs. Temporary files are in memory, bounded, and gone with the last process:
nothing has to be removed. `guest_filter` is its seccomp filter, which forbids system calls that no task needs and that make
namespaces or mounts, or reach deep into the kernel. `drop` makes any child another user. Everything is verified afterwards, since
in the past, system calls that succeeded without their full effect have let processes keep root.

Used by that launcher and its children; loading it costs a megabyte (ctypes).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
import socket
import stat
import struct

from peerload.launcher.containment import read, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from peerload.launcher.system.accounts import LauncherAccount


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
"""Number of the system call, the same on all processor architectures."""


class Syscalls:
    """System calls that Python lacks, which take effect on the calling process alone. The C library is loaded once,
    before any process is made."""

    def __init__(self) -> None:
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        self._libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
        self._libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
        with open(LAST_CAPABILITY, encoding="ascii") as file:
            self._capabilities = range(min(int(file.read()), CAPABILITIES_MAX) + 1)

    def _check(self, result: int, what: str) -> None:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")

    def drop_bounding_set(self) -> None:
        """Empty the bounding set: this process and programs that it executes can get no capabilities. Raises OSError."""
        for capability in self._capabilities:
            self._check(self._libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0), "bounding set")

    def drop_capabilities(self) -> None:
        """Drop all capabilities: permitted, inheritable and ambient. Raises OSError."""
        self._check(self._libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "ambient capabilities")
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
        none = (ctypes.c_uint32 * 6)()
        self._check(self._libc.capset(header, none), "capabilities")

    def forbid_new_privileges(self) -> None:
        """Set no_new_privs: set-user-id bits of programs are ignored. Raises OSError."""
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
        """Get SIGKILL when the thread that has forked this process ends. Dropping privileges resets it, so call it after
        that. Raises OSError."""
        self._check(self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "death signal")

    def close_on_exec(self, least: int) -> None:
        """Set close-on-exec on all descriptors from this number on. Raises OSError."""
        self._check(self._libc.close_range(least, 0xFFFFFFFF, CLOSE_RANGE_CLOEXEC), "close_range")

    def unshare(self, flags: int) -> None:
        self._check(self._libc.unshare(flags), "unshare")

    def mount(self, source: str, target: str, kind: str, flags: int, options: str = "") -> None:
        raw = [os.fsencode(text) if text else None for text in (source, target, kind, options)]
        self._check(self._libc.mount(raw[0], raw[1], raw[2], flags, raw[3]), f"mount {target}")

    def unmount(self, path: str) -> None:
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


TEMPORARY = "/tmp"  # noqa: S108 -- a fresh one
SCRATCH = TEMPORARY + "/scratch"
HIDDEN = (
    "/home", "/root", "/run/user", "/etc/peerload", "/run/peerload", "/run/peerload-launcher", "/var/lib/peerload",
    "/var/lib/peerload-launcher",
)  # fmt: skip
"""Home directories, and peerload's own."""
_NODES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
    "ptmx": (5, 2),
}
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
GPUS = ("nvidia", "dri", "kfd")
"""Names, or prefixes of names, of GPU devices in /dev."""


def enter(kernel: Syscalls, bytes_max: int, hidden: tuple[str, ...], *, has_devices: bool, staged: str = "") -> None:
    """Enter a sandbox with a bound on its temporary files. hidden: further directories to hide. has_devices: the guest has
    GPUs of this machine. staged: a directory with its files, which is mounted at SCRATCH. Raises OSError."""
    kernel.unshare(CLONE_NEWNS | CLONE_NEWIPC)
    kernel.mount("", "/", "", MS_REC | MS_SLAVE)
    kernel.make_read_only("/")
    own = os.open(staged, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) if staged else -1
    covered = [path for path in dict.fromkeys((*HIDDEN, *hidden)) if os.path.isdir(path)]
    _devices(kernel, has_devices=has_devices)
    kernel.mount("tmpfs", TEMPORARY, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={bytes_max}")
    for path in ("/var/tmp", "/dev/shm"):  # noqa: S108 -- the same
        if os.path.isdir(path):
            kernel.mount(TEMPORARY, path, "", MS_BIND)
    if staged:
        os.mkdir(SCRATCH)
        kernel.mount(f"/proc/self/fd/{own}", SCRATCH, "", MS_BIND)
        kernel.mount("", SCRATCH, "", MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV)
        os.close(own)
    for path in covered:
        if os.path.isdir(path):
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
    """Make a /dev of its own. It contains the terminals of the machine, but a guest can open only its own."""
    nodes = dict(_NODES)
    pts = os.open("/dev/pts", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    gpus = _found("/dev") if has_devices else []
    kernel.mount("tmpfs", "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=64k,nr_inodes=512")
    before = os.umask(0)
    try:
        for name, numbers in nodes.items():
            os.mknod(f"/dev/{name}", 0o666 | stat.S_IFCHR, os.makedev(*numbers))
        for path, status in gpus:
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            os.mknod(path, status.st_mode, status.st_rdev)
            os.chown(path, status.st_uid, status.st_gid)
        for name, target in _LINKS.items():
            os.symlink(target, f"/dev/{name}")
        os.mkdir("/dev/pts", 0o755)
        os.mkdir("/dev/shm", 0o1777)  # noqa: S108
    finally:
        os.umask(before)
    kernel.mount(f"/proc/self/fd/{pts}", "/dev/pts", "", MS_BIND)
    os.close(pts)
    kernel.mount("", "/dev", "", MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NOEXEC | MS_BIND)


def _found(directory: str) -> list[tuple[str, os.stat_result]]:
    """GPU devices, also in subdirectories."""
    found: list[tuple[str, os.stat_result]] = []
    for name in sorted(os.listdir(directory)):
        path = f"{directory}/{name}"
        if directory == "/dev" and not name.startswith(GPUS):
            continue
        status = os.lstat(path)
        if stat.S_ISCHR(status.st_mode):
            found.append((path, status))
        elif stat.S_ISDIR(status.st_mode):
            found += _found(path)
    return found


_LOAD, _EQUAL, _GREATER_EQUAL, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_X32 = 0x40000000
"""The bit of x32 system call numbers, which no program uses."""
CLONE_NEW_ANY = 0x7E020000
"""The flags of clone(2) that make namespaces."""
FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""
TERMINAL_INJECTION = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: they put input into a terminal as if it had been typed."""
SAME_PERSONALITY = (0, 0xFFFFFFFF)

_FORBIDDEN = (  # name, x86_64, aarch64
    ("acct", 163, 89),
    ("add_key", 248, 217),
    ("bpf", 321, 280),
    ("chroot", 161, 51),
    ("clock_adjtime", 305, 266),
    ("clock_settime", 227, 112),
    ("delete_module", 176, 106),
    ("finit_module", 313, 273),
    ("init_module", 175, 105),
    ("kexec_file_load", 320, 294),
    ("kexec_load", 246, 104),
    ("keyctl", 250, 219),
    ("lookup_dcookie", 212, 18),
    ("mount", 165, 40),
    ("open_by_handle_at", 304, 265),
    ("perf_event_open", 298, 241),
    ("pivot_root", 155, 41),
    ("quotactl", 179, 60),
    ("reboot", 169, 142),
    ("request_key", 249, 218),
    ("setns", 308, 268),
    ("settimeofday", 164, 170),
    ("swapoff", 168, 225),
    ("swapon", 167, 224),
    ("syslog", 103, 116),
    ("umount2", 166, 39),
    ("unshare", 272, 97),
    ("userfaultfd", 323, 282),
    ("vhangup", 153, 58),
)
_FORBIDDEN_EVERYWHERE = (425, 428, 429, 430, 431, 432, 433, 442, 467)
"""io_uring_setup and the new mount calls; the same numbers on all machines."""
_FORBIDDEN_X86 = (154,)
"""modify_ldt: 16-bit segments. No current program needs them, and attacks on the kernel used them."""
_MACHINES = {  # audit number, column above; clone, clone3, socket, socketpair, ioctl, personality
    "x86_64": (0xC000003E, 1, (56, 435, 41, 53, 16, 135)),
    "aarch64": (0xC00000B7, 2, (220, 435, 198, 199, 29, 92)),
}


def guest_filter(machine: str = "") -> bytes:
    """The filter program for this kind of machine; empty if its system calls are unknown. machine: another kind, for
    tests."""
    machine = machine or os.uname().machine
    if machine not in _MACHINES:
        return b""
    audit, column, (clone, clone3, socket, socketpair, ioctl, personality) = _MACHINES[machine]
    one = _instruction
    program = [
        one(_LOAD, _ARCHITECTURE_AT),
        one(_EQUAL, audit, 1, 0),
        one(_RETURN, _ERRNO | _EPERM),  # calls with the numbers of another processor architecture
        one(_LOAD, _NUMBER_AT),
        one(_GREATER_EQUAL, _X32, 0, 1),
        one(_RETURN, _ERRNO | _ENOSYS),
    ]
    alone = _FORBIDDEN_X86 if machine == "x86_64" else ()
    for number in (*(int(row[column]) for row in _FORBIDDEN), *_FORBIDDEN_EVERYWHERE, *alone):
        program += [one(_EQUAL, number, 0, 1), one(_RETURN, _ERRNO | _EPERM)]
    program += [
        one(_EQUAL, clone3, 0, 1),
        one(_RETURN, _ERRNO | _ENOSYS),
    ]  # the filter cannot see the flags of clone3; programs then use clone(2)
    program += _for_call(clone, 0, [one(_HAS_BIT, CLONE_NEW_ANY, 0, 1), one(_RETURN, _ERRNO | _EPERM)])
    refused = [one(_RETURN, _ERRNO | _EAFNOSUPPORT)]
    for number in (socket, socketpair):
        program += _for_call(number, 0, _one_of(FAMILIES, refused))
    program += _for_call(personality, 0, _one_of(SAME_PERSONALITY, [one(_RETURN, _ERRNO | _EPERM)]))
    typed = [part for asked in TERMINAL_INJECTION for part in (one(_EQUAL, asked, 0, 1), one(_RETURN, _ERRNO | _EPERM))]
    program += _for_call(ioctl, 1, typed)
    program.append(one(_RETURN, _ALLOW))
    return b"".join(program)


def _for_call(number: int, argument: int, judgement: list[bytes]) -> list[bytes]:
    """Filter instructions for one system call, with the lower half of one of its arguments. The call is allowed
    unless they return."""
    inner = [_instruction(_LOAD, _ARGUMENTS_AT + 8 * argument), *judgement, _instruction(_RETURN, _ALLOW)]
    return [_instruction(_EQUAL, number, 0, len(inner)), *inner]


def _one_of(values: tuple[int, ...], otherwise: list[bytes]) -> list[bytes]:
    """Skip ``otherwise`` for these values."""
    count = len(values)
    tests = [_instruction(_EQUAL, value, count - at - 1 + len(otherwise), 0) for at, value in enumerate(values)]
    return [*tests, *otherwise]


def _instruction(code: int, value: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, jump_true, jump_false, value)


FILES_SOFT_MAX = 1024
"""Soft limit on open files of a task, as after a login."""
OOM_SCORE = 100
"""OOM score: tasks are killed before system services if memory runs out."""
HELPER_PROCESSES_MAX = 64
"""Bound on processes of a helper that acts for a guest."""
NONE = b"0" * 16


class DropFailed(Exception):
    """This process still has rights that it should have dropped."""


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
    except OSError:  # the file may not be writable
        return


def drop(account: LauncherAccount, kernel: Syscalls) -> None:
    """Become this account: all ids and groups, no capabilities now or later, no keys. Raises OSError, DropFailed."""
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
    """Raises DropFailed unless the kernel reports that this process has the account's ids and no further rights."""
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
