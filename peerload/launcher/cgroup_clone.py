"""Starts of processes directly in another cgroup, so that they need no move: `CgroupClone`. Used by the launcher alone."""

from __future__ import annotations

import ctypes  # takes a megabyte of memory
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

SYS_CLONE3 = 435
CLONE_INTO_CGROUP = 0x2_0000_0000
SETSIGDEF, SETSIGMASK, SETSID, SETCGROUP = 0x04, 0x08, 0x80, 0x100
"""Flags of posix_spawnattr_setflags, see <spawn.h> of glibc."""
OPAQUE_BYTES = 1024
"""Larger than each opaque structure of <spawn.h> and <signal.h>; the largest has 336 bytes."""


class CgroupClone:
    """clone3(CLONE_INTO_CGROUP), Linux 5.7: starts processes in the cgroup that was entered last, until `leave`.

    signals_default: signals that have their default effect in a spawned process. can_spawn: the C library (glibc from 2.39 on)
    supports `posix_spawn` here; unlike `fork`, it copies no page of the launcher.
    """

    def __init__(self, signals_default: Iterable[int]) -> None:
        self._directory = -1
        self._libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock, which a forked child needs
        self._attributes = ctypes.create_string_buffer(OPAQUE_BYTES)
        self.can_spawn = hasattr(self._libc, "posix_spawnattr_setcgroup_np")
        if self.can_spawn:
            self._set_attributes(signals_default)

    def _set_attributes(self, signals_default: Iterable[int]) -> None:
        libc, attributes, found = self._libc, self._attributes, ctypes.create_string_buffer(OPAQUE_BYTES)
        libc.posix_spawnattr_init(attributes)
        libc.posix_spawnattr_setflags(attributes, ctypes.c_short(SETSIGDEF | SETSIGMASK | SETSID | SETCGROUP))
        libc.sigemptyset(found)
        libc.posix_spawnattr_setsigmask(attributes, found)
        for number in signals_default:
            libc.sigaddset(found, number)
        libc.posix_spawnattr_setsigdefault(attributes, found)

    def enter(self, path: str) -> None:
        """Start processes in this cgroup. Raises OSError."""
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def leave(self) -> None:
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    def fork(self) -> int:
        """Fork → the pid; 0 in the child, which may only exec or end. Raises OSError."""
        arguments = (ctypes.c_uint64 * 11)(CLONE_INTO_CGROUP, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, self._directory)
        pid = int(self._libc.syscall(SYS_CLONE3, arguments, ctypes.sizeof(arguments)))
        if pid < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return pid

    def posix_spawn(
        self,
        program: bytes,
        argv: Sequence[bytes],
        environment: dict[bytes, bytes],
        file_actions: Sequence[tuple[Any, ...]],
    ) -> int:
        """Same as `os.posix_spawn`, with a new session and no blocked signals → the pid. Raises OSError, ValueError,
        TypeError."""
        libc, actions, pid = self._libc, ctypes.create_string_buffer(OPAQUE_BYTES), ctypes.c_int()
        if b"" in environment or (b"=" in b"".join(environment) and any(b"=" in name[1:] for name in environment)):
            raise ValueError("illegal environment variable name")
        words = _strings(argv), _strings(list(map(b"%b=%b".__mod__, environment.items())))
        libc.posix_spawnattr_setcgroup_np(self._attributes, self._directory)
        number = libc.posix_spawn_file_actions_init(actions)
        try:
            for action in file_actions:
                if action[0] == os.POSIX_SPAWN_OPEN:
                    _, fd, path, flags, mode = action
                    number = number or libc.posix_spawn_file_actions_addopen(
                        actions, fd, os.fsencode(path), flags, mode
                    )
                else:
                    number = number or libc.posix_spawn_file_actions_adddup2(actions, *action[1:])
            number = number or libc.posix_spawn(ctypes.byref(pid), program, actions, self._attributes, *words)
        finally:
            libc.posix_spawn_file_actions_destroy(actions)
        if number:
            raise OSError(number, os.strerror(number))
        return pid.value


def _strings(words: Sequence[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    """An array of C strings that ends with a null pointer. Raises ValueError, TypeError."""
    if b"\0" in b"".join(words):
        raise ValueError("embedded null byte")
    return (ctypes.c_char_p * (len(words) + 1))(*words)
