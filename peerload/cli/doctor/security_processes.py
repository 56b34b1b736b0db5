"""What `doctor --security` looks at of the processes: where they listen, what they hold open, as whom they run."""

from __future__ import annotations

import os
import re
import socket
import struct
from typing import NamedTuple

from peerload.cli.doctor.facts import AS_SERVICE, FAIL, OK, SKIP, WARN, DoctorInput, Finding, needs_agent
from peerload.cli.doctor.security_files import owner_of
from peerload.model.text import printable
from peerload.text.format import counted

LISTENS, UNCONNECTED = "0A", "07"
"""Of /proc/net/tcp and /proc/net/udp: a socket that waits for anybody."""
ACCEPTS = 0x10000
CLOSE_ON_EXEC = 0o2000000
STANDARD_MAX = 2
TASKS_LOOKED_AT_MAX = 1000
UIDS = 4
REPORT = "stop it (peerload down --all), and please report it"
ASK_ROOT = "its processes cannot be looked into: ask as its owner, or root"
_SECRET_WORDS = re.compile(r"plj1-|://[^/\s:@]*:[^/\s@]+@")


CLAIMS = ("@peerload-agent-", "@peerload-launcher-")
"""Abstract sockets that claim a database for one agent on this machine: nothing is ever accepted or read there."""


class Listening(NamedTuple):
    """A socket that waits for anybody: tcp, udp or unix, and where."""

    kind: str
    where: str


def _processes(facts: DoctorInput) -> dict[str, int]:
    return {"agent": int(facts.info["pid"]), "launcher": int(facts.info.get("launcher_pid") or 0)}


def _inodes(facts: DoctorInput, pid: int) -> set[str] | None:
    """Of the sockets that a process holds; None if that cannot be looked at."""
    found = set()
    try:
        for link in (facts.root / f"proc/{pid}/fd").iterdir():
            try:
                target = str(link.readlink())
            except FileNotFoundError:
                continue  # it was closed meanwhile
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        return None
    return found


def sockets_of(facts: DoctorInput, pid: int) -> list[Listening] | None:
    """Where a process waits for anybody; None if that cannot be looked at."""
    inodes = _inodes(facts, pid)
    if inodes is None:
        return None
    found = []
    for kind, name, state in (
        ("tcp", "tcp", LISTENS),
        ("tcp", "tcp6", LISTENS),
        ("udp", "udp", UNCONNECTED),
        ("udp", "udp6", UNCONNECTED),
    ):
        for line in facts.text(f"/proc/{pid}/net/{name}").splitlines()[1:]:
            words = line.split()
            if words[3] == state and words[9] in inodes:
                found.append(Listening(kind, _address(words[1])))
    for line in facts.text(f"/proc/{pid}/net/unix").splitlines()[1:]:
        words = line.split(None, 7)
        if words[6] in inodes and int(words[3], 16) & ACCEPTS:
            name = words[7] if len(words) > 7 else ""  # noqa: PLR2004 -- the path, if any
            if not name.startswith(CLAIMS):
                found.append(Listening("unix", name))
    return found


def _address(text: str) -> str:
    """`HOST:PORT` of what /proc/net/tcp writes."""
    host, _, port = text.partition(":")
    words = [struct.pack("=I", int(host[at : at + 8], 16)) for at in range(0, len(host), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    shown = socket.inet_ntop(family, b"".join(words))
    return f"[{shown}]:{int(port, 16)}" if ":" in shown else f"{shown}:{int(port, 16)}"


@needs_agent
def listening(facts: DoctorInput) -> Finding:
    """Whether the agent listens on its Unix socket and its one address, the launcher on its own socket, and that is all."""
    processes = _processes(facts)
    held = sockets_of(facts, processes["agent"])
    if held is None:
        return Finding(SKIP, ASK_ROOT)
    configured = {str(one.get("key")): one.get("value") for one in facts.settings}
    host = str(configured.get("listen") or facts.info["listen"]).rpartition(":")[0]
    port = str(facts.info["listen"]).rpartition(":")[2]
    found = [("the agent", one) for one in held if not _is_expected(facts, one, host, port)]
    if len([one for one in held if one.kind in ("tcp", "udp")]) != len({one.kind for one in held} & {"tcp", "udp"}):
        found += [("the agent", one) for one in held if one.kind != "unix"]
    for one in sockets_of(facts, processes["launcher"]) or ():
        if one.kind != "unix" or not one.where.endswith("launcher.sock"):
            found.append(("the launcher", one))
    if found:
        who, what = found[0]
        return Finding(FAIL, f"{who} listens at {what.kind} {what.where or '(no name)'}, too", REPORT)
    where = [f"{one.kind} {one.where}" for one in held]
    return Finding(OK, f"the agent listens at {', '.join(where)}, and nowhere else")


def _is_expected(facts: DoctorInput, one: Listening, host: str, port: str) -> bool:
    if one.kind == "unix":
        return os.path.realpath(one.where) == os.path.realpath(str(facts.info.get("socket", "")))
    told_host, _, told_port = one.where.rpartition(":")
    if told_port != port:
        return False
    is_anybody = told_host.strip("[]") in ("0.0.0.0", "::")  # noqa: S104 -- only compared
    return not is_anybody or host.strip("[]") in ("0.0.0.0", "::", "*")  # noqa: S104 -- as above


@needs_agent
def descriptors(facts: DoctorInput) -> Finding:
    """Whether anything that agent or launcher hold open would be passed on to what they start."""
    looked_at = 0
    for who, pid in _processes(facts).items():
        try:
            names = [path.name for path in (facts.root / f"proc/{pid}/fdinfo").iterdir()]
        except OSError:
            return Finding(SKIP, ASK_ROOT)
        for name in names:
            flags = re.search(r"^flags:\s+(\d+)", facts.text(f"/proc/{pid}/fdinfo/{name}"), re.MULTILINE)
            if flags is None or int(name) <= STANDARD_MAX:
                continue
            looked_at += 1
            if not int(flags[1], 8) & CLOSE_ON_EXEC:
                target = (facts.root / f"proc/{pid}/fd/{name}").readlink()
                return Finding(FAIL, f"descriptor {name} of the {who} ({target}) would be passed to tasks", REPORT)
    return Finding(OK, f"all {looked_at} descriptors of agent and launcher close when a task starts")


def _status(facts: DoctorInput, pid: int | str) -> dict[str, str]:
    lines = facts.text(f"/proc/{pid}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@needs_agent
def whose_tasks(facts: DoctorInput) -> Finding:
    """As whom tasks of others run here."""
    uid = owner_of(facts)
    if facts.security["mode"] == "system":
        if uid == 0:
            return Finding(FAIL, "the agent runs as root", "start it by its unit:  systemctl start peerload")
        administrators = facts.security.get("administrators") or {}
        names = printable(", ".join(map(str, administrators.get("named") or ())))
        if administrators.get("may_be"):
            says = "users of other nodes may be administrators here, and so may their nodes (map_administrators = true)"
            return Finding(
                WARN, says + (f": {names}" if names else ""), "map them to accounts that may do nothing special"
            )
        if names:
            says = f"users maps to administrators: {names}; nothing runs as them for other nodes"
            return Finding(WARN, says, "map to accounts that may do nothing special")
        return Finding(OK, f"the agent is uid {uid}; the launcher decides as whom each task runs, never as root")
    alone = facts.info.get("cluster_local")
    if uid == 0 and not alone:
        says = "the agent runs as root, in user mode: members of the cluster may run anything here as root"
        return Finding(WARN, says, "run it as a user of its own, or for everyone:  sudo peerload service install")
    who = "only agents of this user and machine" if alone else f"every member of {facts.info.get('cluster')}"
    return Finding(OK, f"tasks run as the agent's own user (uid {uid}), which {who} may have done")


@needs_agent
def hardening(facts: DoctorInput) -> Finding:
    """Whether the agent, as a service, can gain rights that it does not have."""
    if facts.security["mode"] != "system":
        return Finding(SKIP, "user mode: the agent has the rights of its user, and so have its tasks")
    told = _status(facts, facts.info["pid"])
    if told.get("NoNewPrivs") != "1" or int(told.get("CapEff", "0"), 16):
        return Finding(FAIL, "the agent could gain rights", "start it by its unit:  systemctl start peerload")
    return Finding(OK, "the agent has no capabilities and can gain none")


@needs_agent
def containment(facts: DoctorInput) -> Finding:
    """Whether what cannot be enforced here is told."""
    told = facts.checkup["launcher"]
    if told["units"] == "bare" and not told["unenforced"]:
        return Finding(FAIL, "tasks are not held together by a cgroup, and that is not told", REPORT)
    if told["unenforced"]:
        says = f"not enforced here, and said so: {'; '.join(told['unenforced'])}"
        return Finding(WARN, says, AS_SERVICE)
    return Finding(OK, f"held by {told['units']}, memory by {told['memory'] or 'nothing'}")


@needs_agent
def launcher(facts: DoctorInput) -> Finding:
    """Whether what starts tasks is a process of its own, with rights that the agent has not."""
    processes = _processes(facts)
    if not processes["launcher"] or processes["launcher"] == processes["agent"]:
        return Finding(FAIL, "there is no launcher", "peerload down && peerload up")
    if facts.security["mode"] != "system":
        return Finding(SKIP, "user mode: agent and launcher are of one user")
    uids = {who: _status(facts, pid).get("Uid", "?").split() for who, pid in processes.items()}
    if "0" in uids["agent"] or uids["launcher"] != ["0"] * UIDS:
        return Finding(FAIL, f"the agent runs as {uids['agent'][0]}, the launcher as {uids['launcher'][0]}", REPORT)
    return Finding(OK, f"the launcher alone is root; the agent is uid {uids['agent'][0]}")


@needs_agent
def isolated(facts: DoctorInput) -> Finding:
    """Whether the launcher's Python heeds its user's directories and variables."""
    words = facts.text(f"/proc/{_processes(facts)['launcher']}/cmdline").split("\0")
    if len(words) < 2:  # noqa: PLR2004 -- a program and its flags
        return Finding(SKIP, ASK_ROOT)
    if "-I" not in words[1:3]:
        return Finding(FAIL, "the launcher's Python heeds PYTHONPATH", "peerload down --all && peerload up")
    return Finding(OK, "the launcher's Python heeds nothing but its own files (-I)")


@needs_agent
def running_tasks(facts: DoctorInput) -> Finding:
    """Whether each task that runs has the ids of one ordinary user, no capabilities, and can gain none."""
    if facts.security["mode"] != "system":
        return Finding(SKIP, "user mode: nothing changes its user")
    launcher_pid, looked_at = str(_processes(facts)["launcher"]), 0
    for path in (facts.root / "proc").glob("[0-9]*"):
        told = _status(facts, path.name)
        if told.get("PPid") != launcher_pid or looked_at >= TASKS_LOOKED_AT_MAX or "launcher" in told.get("Name", ""):
            continue
        words = facts.text(f"/proc/{path.name}/cmdline")
        if "peerload" in words and "launcher" in words:
            continue  # its guard, or one that has not begun to be a task yet
        looked_at += 1
        uids = told.get("Uid", "").split()
        if len(set(uids)) != 1 or uids[0] == "0" or int(told.get("CapEff", "0"), 16) or told.get("NoNewPrivs") != "1":
            return Finding(FAIL, f"pid {path.name} runs with rights it should not have (uids {uids})", REPORT)
    return Finding(OK if looked_at else SKIP, f"{counted(looked_at, 'task')} looked at")


@needs_agent
def command_lines(facts: DoctorInput) -> Finding:
    """Whether every user of the machine can read a secret in the list of processes."""
    for who, pid in _processes(facts).items():
        if _SECRET_WORDS.search(facts.text(f"/proc/{pid}/cmdline").replace("\0", " ")):
            says = f"a secret is on the {who}'s command line, where every user of the machine can read it"
            return Finding(FAIL, says, "name it in the configuration file instead:  peerload config show --origin")
    return Finding(OK, "no secret is on a command line")


@needs_agent
def memory_of_keys(facts: DoctorInput) -> Finding:
    """Whether the agent's memory, with its keys, can end up where others read it."""
    limits = facts.text(f"/proc/{facts.info['pid']}/limits")
    found = re.search(r"^Max core file size\s+(\S+)", limits, re.MULTILINE)
    pattern = facts.text("/proc/sys/kernel/core_pattern").strip()
    dumps = found is not None and found[1] != "0"
    if dumps and facts.security["mode"] == "system":
        return Finding(FAIL, "a crash would write the agent's memory to a file", "LimitCORE=0 in the unit")
    if dumps and pattern and not pattern.startswith("|") and facts.text("/proc/sys/fs/suid_dumpable").strip() == "1":
        return Finding(WARN, "a crash may write the agent's memory where others read it", "sysctl fs.suid_dumpable=0")
    scope = facts.text("/proc/sys/kernel/yama/ptrace_scope").strip()
    more = "" if scope in ("1", "2", "3") else ", and debuggers of the same user may read it"
    return Finding(OK, f"the agent's memory is its user's alone{more}")
