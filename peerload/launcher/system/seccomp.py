"""The seccomp filter of guests: forbids system calls that no task needs and that make namespaces or mounts, or reach
deep into the kernel. Used by the launcher alone."""

from __future__ import annotations

import os
import struct

_LOAD, _EQUAL, _GREATER_EQUAL, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_X32 = 0x40000000
"""The bit of x32 system call numbers, which nothing uses."""
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
"""modify_ldt: 16-bit segments, which no current program needs and which were used to attack the kernel."""
_MACHINES = {  # audit number, column above; clone, clone3, socket, socketpair, ioctl, personality
    "x86_64": (0xC000003E, 1, (56, 435, 41, 53, 16, 135)),
    "aarch64": (0xC00000B7, 2, (220, 435, 198, 199, 29, 92)),
}


def guest_filter(machine: str = "") -> bytes:
    """The filter program for this kind of machine; empty if its system calls are not known. machine: another kind, for
    tests."""
    machine = machine or os.uname().machine
    if machine not in _MACHINES:
        return b""
    audit, column, (clone, clone3, socket, socketpair, ioctl, personality) = _MACHINES[machine]
    one = _instruction
    program = [
        one(_LOAD, _ARCHITECTURE_AT),
        one(_EQUAL, audit, 1, 0),
        one(_RETURN, _ERRNO | _EPERM),  # calls as another kind of processor makes them
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
    ]  # its flags cannot be seen; clone(2) is used then
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
    """Instructions for one call alone, with the lower half of one of its arguments; allowed unless they return."""
    inner = [_instruction(_LOAD, _ARGUMENTS_AT + 8 * argument), *judgement, _instruction(_RETURN, _ALLOW)]
    return [_instruction(_EQUAL, number, 0, len(inner)), *inner]


def _one_of(values: tuple[int, ...], otherwise: list[bytes]) -> list[bytes]:
    """Skip ``otherwise`` for these values."""
    count = len(values)
    tests = [_instruction(_EQUAL, value, count - at - 1 + len(otherwise), 0) for at, value in enumerate(values)]
    return [*tests, *otherwise]


def _instruction(code: int, value: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, jump_true, jump_false, value)
