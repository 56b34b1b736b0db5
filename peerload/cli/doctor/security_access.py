"""What `doctor --security` finds out at the local socket: whose it is, who answers, and what it does not take."""

from __future__ import annotations

import grp
import os
import shlex
import socket as sockets
import stat
import struct
import warnings
from pathlib import Path

from peerload.cli.doctor.facts import FAIL, OK, SKIP, DoctorInput, Finding, needs_agent
from peerload.cli.doctor.security_files import owner_of, replaceable

NOBODY = 65534
TRY_S_MAX = 5.0
GROUP = "peerload"
HEADER_BYTES = 4
TOO_DEEP = b"\x82\xa2id\x01\xa4verb" + b"\x91" * 10_000 + b"\xc0"
REPORT = "stop it (peerload down), and please report it"
INFO = bytes.fromhex("82a2696401a476657262a4696e666f")  # {"id": 1, "verb": "info"}


def socket(facts: DoctorInput) -> Finding:
    """Whether nobody but its user (in system mode: the group) can speak to the agent, or put a socket in its place."""
    path = Path(facts.socket)
    try:
        status = path.lstat()
    except OSError as error:
        return Finding(SKIP, f"{path}: {error.strerror}")
    owner, is_system = owner_of(facts), facts.security.get("mode") == "system"
    if not stat.S_ISSOCK(status.st_mode):
        return Finding(FAIL, f"{path} is no socket", "peerload up")
    if status.st_uid not in (owner, 0):
        return Finding(FAIL, f"{path} is somebody else's (uid {status.st_uid})", "peerload up --socket PATH")
    if status.st_mode & (0o007 if is_system else 0o077):
        return Finding(
            FAIL, f"others may connect to {path}", f"chmod {'o=' if is_system else 'go='} {shlex.quote(str(path))}"
        )
    group = next((str(one.get("value")) for one in facts.settings if one.get("key") == "group"), GROUP)
    if is_system and status.st_mode & 0o060 and status.st_gid not in (_gid(group), owner):
        return Finding(FAIL, f"{path} is not the group {group}'s", f"chgrp {group} {shlex.quote(str(path))}")
    if fault := replaceable(path, owner):
        return Finding(FAIL, *fault)
    return Finding(OK, f"{path} is {f'the group {group}' if is_system else f'uid {owner}'}'s alone")


def _gid(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return -1


@needs_agent
def who_answers(facts: DoctorInput) -> Finding:
    """Whether the process that listens is the agent that it says it is."""
    with sockets.socket(sockets.AF_UNIX) as client:
        client.settimeout(TRY_S_MAX)
        client.connect(facts.socket)
        raw = client.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    if uid not in (owner_of(facts), 0) or pid not in (facts.info["pid"], 1):
        return Finding(FAIL, f"pid {pid} of uid {uid} listens there, not the agent", f"ls -l /proc/{pid}/exe")
    return Finding(OK, f"pid {pid} of uid {uid} listens there")


@needs_agent
def others_are_refused(facts: DoctorInput) -> Finding:
    """Whether another user of this machine is served; root alone can try."""
    if facts.user_id != 0:
        return Finding(SKIP, "only root can ask as somebody else")
    told = asked_as(NOBODY, facts.socket)
    if b"\xa2ok" in told:
        return Finding(FAIL, f"uid {NOBODY} is served", REPORT)
    return Finding(OK, f"uid {NOBODY} is not served")


def asked_as(user_id: int, path: str) -> bytes:
    """What the agent answers to another user; empty if it does not, or cannot be reached. Only root can ask."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child makes system calls alone
        child = os.fork()
    if not child:
        os.close(reading)
        try:
            os.setgroups([])
            os.setresgid(user_id, user_id, user_id)
            os.setresuid(user_id, user_id, user_id)
            os.write(writing, _asked(path))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return told


def _asked(path: str) -> bytes:
    with sockets.socket(sockets.AF_UNIX) as client:
        client.settimeout(TRY_S_MAX)
        try:
            client.connect(path)
            client.sendall(_framed(INFO))
            return client.recv(65536)
        except OSError:
            return b""


@needs_agent
def requests_are_bounded(facts: DoctorInput) -> Finding:
    """Whether a request that claims too much, or nests too deep, is refused."""
    for what, data in (("of 4 GiB", b"\xff" * HEADER_BYTES), ("nested 10,000 deep", _framed(TOO_DEEP))):
        with sockets.socket(sockets.AF_UNIX) as client:
            client.settimeout(TRY_S_MAX)
            client.connect(facts.socket)
            try:
                client.sendall(data)
                told = client.recv(65536)
            except OSError:
                told = b""
        if b"\xa5error" not in told:
            return Finding(FAIL, f"a request {what} is not refused", REPORT)
    bounds = facts.security.get("bounds") or {}
    return Finding(
        OK, f"requests too large or too deep are refused; at most {bounds.get('local clients', '?')} clients"
    )


def _framed(raw: bytes) -> bytes:
    return len(raw).to_bytes(HEADER_BYTES, "big") + raw
