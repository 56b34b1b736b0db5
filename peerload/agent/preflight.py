"""Preflight checks: an agent that cannot run on this machine, or has a copy of another's state, ends before it starts a process.

An agent does not start with a copy of a state directory while the agent of the original may run the same tasks. Copies on another
machine: the file STATE/origin names the machine and the file's own inode. A copy on another machine differs in both. If only the
machine differs, it is the same disk (a shared file system, a disk that was moved, a machine that gets a new id
with each boot). If only the inode differs, the directory was moved by copying.

Copies on the same machine: an agent and its launcher bind an abstract socket that is named after the id of the database, since the
lock file of a state directory is copied with it. The kernel frees the name when the process ends. Copies that are used on two
machines nevertheless are noticed by their peers (`local_node.py`).

Lost or unreadable parts of the database are reported as notices, events and log lines."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from peerload.agent.control.connection import check_socket
from peerload.agent.launcher.process import is_alive, wait_gone
from peerload.agent.peers.links import check_listening
from peerload.agent.peers.membership import ADDRESS_FILE, AddressFile
from peerload.agent.store.store import FILE, GAP
from peerload.launcher.protocol import STOP_GRACE_S, claim_name
from peerload.model.actions import PutEvent
from peerload.model.errors import ConfigError, StoreError
from peerload.model.task import is_id
from peerload.security import node_identity_file
from peerload.security.address import parse_address
from peerload.security.broker import BrokerUrl, check_ca

if TYPE_CHECKING:
    from collections.abc import Mapping

    from peerload.agent.store.store import Store
    from peerload.agent.store.write_ahead import EventLog
    from peerload.agent.systemd import ServiceManager
    from peerload.model.config import AgentConfig


log = logging.getLogger("peerload.agent")

STOP_S_MAX = STOP_GRACE_S + 10.0
"""Time in s for a launcher to end its tasks and itself after a request to stop."""
ORIGIN_FILE = "origin"
MACHINE_ID = Path("/etc/machine-id")
ID_DIGITS = 32
LINE_BYTES_MAX = 200
DAMAGED_LOGGED_MAX = 100
"""Maximum number of damaged rows that are named at a start; `ls` lists all of them."""
JUMP = 1_000_000
"""Lowest number at which ids continue if the earlier ones are unknown."""
TRACES = ("spool", "launcher", "addresses", "tls", FILE)
"""Entries of STATE that an agent creates only after its database."""


def check_addresses(config: AgentConfig, *, loopback_only: bool) -> None:
    """Check that every address is valid. Raises ConfigError, which names the key.

    loopback_only: addresses of other machines are errors, too, since the agent has no cluster beyond its machine.
    """
    told = (config.advertise,) if config.advertise else ()
    for key, addresses in (("listen", (config.listen,)), ("advertise", told), ("peer", config.peer)):
        for address in addresses:
            parse_address(key, address, loopback_only=loopback_only)
    for url in config.mqtt:
        BrokerUrl.parse(url).known_as(config.mqtt_password_file)
    if config.mqtt:
        check_ca(config.mqtt_ca)


def check_joined(config: AgentConfig, origins: Mapping[str, str] | None) -> None:
    """Check that the directory of the cluster that this node joined is there. Raises ConfigError."""
    joined = (origins or {}).get("cluster", "")
    if Path(joined).name != node_identity_file.NAME or os.path.lexists(config.cluster):
        return
    again = "sudo systemctl restart peerload" if config.mode == "system" else "peerload up"
    raise ConfigError(
        "cluster",
        f"{config.cluster} is not there, and this node joined its cluster ({joined})",
        hint=f"start without a cluster:  mv {joined} {joined}.old ; {again}        stay a member:  put it back, or  peerload join TOKEN",
    )


async def check_places(
    config: AgentConfig, origins: Mapping[str, str] | None, manager: ServiceManager, *, loopback_only: bool
) -> None:
    """Check that the places where clients and peers connect are free. Raises ConfigError."""
    handed_over = manager.listener(config.socket)
    if handed_over is not None:
        handed_over.close()
    else:
        check_socket(config)
    without = AddressFile(Path(config.state) / ADDRESS_FILE).network_absence(origins or {})
    await check_listening(*parse_address("listen", config.listen, loopback_only=loopback_only), without)


# -- on another machine ------------------------------------------------------------------------------------------------


def check_origin(state: Path) -> None:
    """Refuse a copy, else store the current place of the directory. Without a machine id or a readable file, nothing is
    refused. Raises StoreError."""
    machine = _machine()
    path = state / ORIGIN_FILE
    with contextlib.suppress(OSError):
        found = _read(path)
        if machine and found is not None and found[0] != machine and found[1] != path.stat().st_ino:
            raise StoreError(
                f"the state directory {state} is a copy that was made on another machine",
                why="an agent there may run the same tasks: each of them would run twice",
                hint=f"a new node:  peerload up --node NAME --state NEW_DIR        if no agent runs with the original any more: "
                f" rm {path}",
            )
        _write(path, machine)


def _machine() -> str:
    """The id of this machine, hashed as its manual page requires; "" if it has none."""
    try:
        found = MACHINE_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    if len(found) != ID_DIGITS:  # "uninitialized", or nothing
        return ""
    return hashlib.sha256(f"peerload {found}".encode()).hexdigest()[:ID_DIGITS]


def _read(path: Path) -> tuple[str, int] | None:
    """The stored (machine, inode); None if they cannot be read."""
    try:
        machine, inode = path.read_text(encoding="ascii")[:LINE_BYTES_MAX].split()
        return machine, int(inode)
    except (OSError, ValueError):
        return None


def _write(path: Path, machine: str) -> None:
    """Write the file, without a sync: if the file is lost, nothing is refused."""
    if not machine:
        return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        line = f"{machine} {os.fstat(fd).st_ino}\n".encode("ascii")
        os.pwrite(fd, line, 0)
        os.ftruncate(fd, len(line))
    finally:
        os.close(fd)


# -- on the same machine -----------------------------------------------------------------------------------------------


def claim(store: str, state: Path) -> socket.socket:
    """Claim the database as long as the socket is open. Raises StoreError if another agent here has a copy of this state."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        held.bind(claim_name("agent", store))  # nobody may connect: it does not listen
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            raise StoreError(f"the database in {state} cannot be claimed", why=str(error.strerror)) from None
        pid, _ = _holder("agent", store)
        raise StoreError(
            f"another agent (pid {pid or '?'}) works with a copy of {state}: both would run the same tasks",
            why="both have the same database id",
            hint="another node on this machine begins with a state of its own:  peerload up --node NAME --state NEW_DIR",
        ) from None
    return held


def end_foreign_launcher(store: str, launcher: Path) -> bool:
    """End a launcher, and its tasks, that serves this database but another directory: this directory was copied,
    or restored from a copy, while tasks ran, and no agent here knows them. → True if there was one.
    Blocks; raises StoreError if it does not end."""
    if _is_locked(launcher / "launcher.lock"):
        return False
    pid, uid = _holder("launcher", store)
    if not pid or uid != os.geteuid():
        return False
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return True
    wait_gone(pid, STOP_S_MAX)
    if is_alive(pid):
        raise StoreError(
            f"the launcher of another copy of this state directory (pid {pid}) runs tasks and does not end",
            hint=f"kill -9 {pid}, then start again",
        )
    return True


def _holder(what: str, store: str) -> tuple[int, int]:
    """(pid, uid) of the process that holds a claim, if it is visible to this user; zeros if there is none."""
    shown = claim_name(what, store).replace("\0", "@")
    lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    inodes = {f"socket:[{line.split()[6]}]" for line in lines if line.endswith(f" {shown}")}
    for process in Path("/proc").iterdir() if inodes else ():
        if not process.name.isdigit():
            continue
        try:
            if any(str(fd.readlink()) in inodes for fd in (process / "fd").iterdir()):
                return int(process.name), process.stat().st_uid
        except OSError:
            continue  # a process of another user, or ended
    return 0, 0


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


# -- damage of the database -------------------------------------------------------------------------------------------


def traces(state: Path) -> list[str]:
    """The traces of an earlier agent in this directory. Call it before anything new is made there."""
    return [name for name in TRACES if _has_any_entry(state / name)]


def _has_any_entry(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


def begin_anew(store: Store, config: AgentConfig, found: list[str]) -> str:
    """If traces of an earlier database are ``found``, let ids continue in the new one above the high-water mark
    and above the Unix time in seconds, which no home with less than one task a second has reached. → a notice,
    or ""."""
    if not store.is_new or not found:
        return ""
    node, mark = config.node, store.found_mark
    counter = max(int(time.time()), JUMP, mark.counter + GAP if mark is not None else 0)
    store.count_on_from(counter)
    last = f", of which {node}/{mark.counter} was the last," if mark is not None and mark.counter else ""
    notice = (
        f"the database of {config.state} is new, though an agent was here before (there is {', '.join(found)}): "
        f"the tasks that it had acknowledged{last} are lost; new ids begin at {node}/{counter + 1}"
    )
    log.warning("database is new after an earlier agent: next_id=%s/%d reason=%s", node, counter + 1, notice)
    return notice


def begin_as_copy(store: Store, config: AgentConfig) -> str:
    """Give the database a new id, since the state directory is a copy of one whose launcher ran tasks until now
    (they were ended). The database may be older than this node's latest promises, so peers must not rely on its
    promises about earlier attempts. → a notice."""
    store.take_new_id()
    notice = (
        f"{config.state} is a copy, or was restored from one: the launcher of the original still ran and was ended with"
        " its tasks, and changes since the copy was made are unknown here"
    )
    log.error("state directory is a copy: directory=%s reason=%s", config.state, notice)
    return notice


def report_damage(notices: list[str], store: Store, journal: EventLog) -> list[str]:
    """Report lost and unreadable parts of the database in the log and the event log. notices: from `begin_anew` and
    `begin_as_copy`. → all notices, for the user who starts the agent."""
    notices, damaged, unreadable = list(notices), store.damaged, store.unreadable
    for notice in notices:
        journal.record("store", "lost", reason=notice)
    for damage in damaged[:DAMAGED_LOGGED_MAX]:
        log.error("task is damaged and is not served: task=%s reason=%s", damage.task, damage.why)
        task, reason = (damage.task, damage.why) if is_id(damage.task) else ("", f"{damage.task}: {damage.why}")
        journal.note(PutEvent(time.time(), "store", "damaged", task=task, reason=reason))
    for reason in unreadable[:DAMAGED_LOGGED_MAX]:
        log.error("database row cannot be read: reason=%s", reason)
        journal.record("store", "damaged", reason=reason)
    if damaged:
        names = ", ".join(damage.task for damage in damaged[:3]) + (" ..." if len(damaged) > 3 else "")  # noqa: PLR2004
        notices.append(f"{len(damaged)} damaged tasks are not served ({names}); see:  peerload ls")
    if unreadable:
        notices.append(
            f"{len(unreadable)} other rows of the database cannot be read; see:  peerload events --what store"
        )
    if store.lost is not None:  # its event is already in the database
        notices.append(store.lost.message(store.node))
        log.error("acknowledged commits are lost: reason=%s", notices[-1])
    return notices
