"""Checks of `doctor` on the agent: that it runs, its place on the disk, its launcher and its Python."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import sys
import time
from pathlib import Path

from peerload import __version__, notification
from peerload.cli.doctor.facts import AS_SERVICE, FAIL, OK, SKIP, WARN, DoctorInput, Finding, needs_agent
from peerload.model.errors import AgentSilent
from peerload.text.format import counted, size_text

SLOW_SYNC_S = 0.2
"""A disk that takes longer to keep a small file makes every submit slow."""
SYNCS = 3
PYTHON_MIN = (3, 11)
INODES_MIN = 10_000
LOW_WITHOUT_AGENT_BYTES = 1 << 30
REMOTE = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "fuse.sshfs",
    "9p",
    "ceph",
    "fuse.glusterfs",
    "lustre",
    "afs",
    "beegfs",
)
"""File systems of another machine: a database's locks and log do not hold there."""
VOLATILE = ("tmpfs", "ramfs")


def settings(facts: DoctorInput) -> Finding:
    """Check that an agent started now would take its settings."""
    if facts.config_error is not None:
        error = facts.config_error
        return Finding(FAIL, str(error), error.hint or "peerload config check")
    return Finding(OK, "valid")


def restart(facts: DoctorInput) -> Finding:
    """Check that the agent runs with the settings in its files."""
    if not facts.settings or facts.config is None:
        return Finding(SKIP, "no agent runs" if not facts.info else "unknown until the settings are valid")
    from peerload.cli.common.agent_process import compared

    changed = [one["key"] for one in compared(facts.settings, facts.config) if one["needs_restart"]]
    if changed:
        says = f"changed since the agent was started: {', '.join(changed)}"
        return Finding(WARN, says, "peerload down && peerload up        details:  peerload config show --origin")
    return Finding(OK, "the agent uses the current settings")


def hooks(facts: DoctorInput) -> Finding:
    """Check that the hooks of the node have their secret and their program for mail."""
    settings = facts.config.hooks if facts.config is not None else None
    if settings is None or not settings.targets():
        return Finding(SKIP, "no hooks are configured")
    if path := settings.secret_file:
        try:
            mode = os.stat(path).st_mode  # noqa: PTH116
        except OSError as error:
            return Finding(FAIL, f"secret_file {path} cannot be read: {error.strerror}", "webhooks are not sent")
        if mode & 0o077:
            return Finding(WARN, f"others may read the secret {path}", f"chmod go= {path}")
    is_mailing = any(notification.kind_of(target) == "mail" for target in settings.targets())
    if is_mailing and shutil.which(settings.sendmail or "sendmail", path=notification.SENDMAIL_PATH) is None:
        says = f"there is no {settings.sendmail or 'sendmail in ' + notification.SENDMAIL_PATH}: no mail is sent"
        return Finding(FAIL, says, "sudo apt install msmtp-mta        or  [hooks] sendmail")
    return Finding(OK, f"{counted(len(settings.targets()), 'target')}; failures:  peerload events --what hook")


def agent(facts: DoctorInput) -> Finding:
    """Check that an agent answers."""
    if facts.info:
        says = (
            f"node {facts.info.get('node')} answers in {facts.answered_s * 1000:.0f} ms (pid {facts.info.get('pid')})"
        )
        return Finding(OK, says)
    error = facts.agent_error
    if isinstance(error, AgentSilent):
        return Finding(FAIL, str(error), error.hint or "see its log:  tail STATE/agent.log")
    return Finding(FAIL, str(error or "no agent is running here"), "peerload up")


def version(facts: DoctorInput) -> Finding:
    """Check that agent and command line are of one version."""
    if not facts.info:
        return Finding(SKIP, "no agent runs")
    theirs = str(facts.info.get("version"))
    if theirs != __version__ or not facts.checkup:
        says = f"the agent is of version {theirs}, this command of {__version__}"
        return Finding(WARN, says, "peerload down && peerload up        running tasks go on meanwhile")
    return Finding(OK, f"agent and command line are {__version__}")


def socket(facts: DoctorInput) -> Finding:
    """Check that no other user can connect to the agent's socket or replace it."""
    path = Path(facts.socket)
    try:
        status, above = path.lstat(), path.parent.stat()
    except OSError as error:
        if not facts.info and isinstance(error, FileNotFoundError):
            return Finding(SKIP, f"none at {path}")
        return Finding(FAIL, f"{path}: {error.strerror}", "peerload up")
    if status.st_uid not in (facts.user_id, 0):
        return Finding(FAIL, f"{path} belongs to another user (uid {status.st_uid})", "peerload up --socket PATH")
    if above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX:
        says = f"other users can replace the socket in {path.parent}"
        return Finding(FAIL, says, f"chmod go-w {shlex.quote(str(path.parent))}")
    if status.st_mode & 0o077:
        says = f"other users can connect to {path} (the agent refuses them)"
        return Finding(WARN, says, f"chmod 600 {shlex.quote(str(path))}")
    return Finding(OK, f"only you can use {path}")


def state(facts: DoctorInput) -> Finding:
    """Check that the state directory belongs to this user, can be written, and keeps what is written."""
    if facts.state is None:
        return Finding(SKIP, "unknown until the settings are valid")
    place = facts.state
    if not os.path.lexists(place):
        return Finding(OK, f"{place} will be created when an agent starts")
    try:
        status = place.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return Finding(FAIL, f"{place} is not a directory", "peerload up --state DIR")
        if facts.user_id not in (status.st_uid, 0):
            return Finding(FAIL, f"{place} belongs to another user (uid {status.st_uid})", "peerload up --state DIR")
        if status.st_mode & 0o022:
            return Finding(FAIL, f"other users can write to {place}", f"chmod 700 {shlex.quote(str(place))}")
        took_s = sorted(_synced_s(place) for _ in range(SYNCS))[SYNCS // 2]
    except OSError as error:
        says = f"{place} cannot be written: {error.strerror}"
        return Finding(FAIL, says, f"ls -ld {shlex.quote(str(place))}        df {shlex.quote(str(place))}")
    if took_s > SLOW_SYNC_S:
        says = f"{place} needs {took_s:.2g} s to sync a small file: each submit waits for it"
        return Finding(WARN, says, "use a faster disk:  peerload up --state DIR")
    return Finding(OK, f"{place} syncs a small file in {took_s * 1000:.1f} ms")


def _synced_s(place: Path) -> float:
    """Time until a small file is on disk. Raises OSError."""
    path = place / f"doctor-{os.getpid()}"
    began_s = time.monotonic()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, b"peerload doctor\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    finally:
        path.unlink(missing_ok=True)
    return time.monotonic() - began_s


def file_system(facts: DoctorInput) -> Finding:
    """Check that the state directory lies on a disk of this machine."""
    if facts.state is None:
        return Finding(SKIP, "the state directory is unknown until the settings are valid")
    kind, mounted = mounted_at(facts, facts.state)
    if kind in REMOTE:
        says = f"{facts.state} is on {kind} ({mounted}), where locks of the database do not work"
        return Finding(FAIL, says, "peerload down; peerload up --state DIR      with DIR on a disk of this machine")
    if kind in VOLATILE:
        says = f"{facts.state} is in memory ({kind} at {mounted}): all tasks are lost when the machine restarts"
        return Finding(WARN, says, "peerload down; peerload up --state DIR      with DIR on a disk")
    return Finding(OK, f"{kind or 'local'}, mounted at {mounted or '/'}")


def mounted_at(facts: DoctorInput, path: Path) -> tuple[str, str]:
    """The kind of file system that a path lies on, and where it is mounted; empty if unknown."""
    real = os.path.realpath(path)
    found = ("", "")
    for line in facts.text("/proc/self/mounts").splitlines():
        words = line.split()
        if len(words) > 2:  # noqa: PLR2004 -- what, where, kind
            where = words[1].encode().decode("unicode_escape")
            if real == where or real.startswith(where.rstrip("/") + "/"):
                found = (words[2], where) if len(where) >= len(found[1]) else found
    return found


def room(facts: DoctorInput) -> Finding:
    """Check that there is room for the output of tasks, and for the reserve."""
    if facts.state is None:
        return Finding(SKIP, "the state directory is unknown until the settings are valid")
    place = next(path for path in (facts.state, *facts.state.parents) if path.exists())
    status = os.statvfs(place)
    free_bytes = status.f_bavail * status.f_frsize
    disk = facts.checkup.get("disk") or {}
    low_bytes = disk.get("low_bytes", min(LOW_WITHOUT_AGENT_BYTES, status.f_blocks * status.f_frsize // 20))
    fix = f"make room:  peerload clean --outputs --older 1d        du -xh --max-depth 1 {shlex.quote(str(place))} | sort -h"
    if status.f_files and status.f_favail < INODES_MIN:
        is_full = disk.get("state") == "full"
        says = "no inodes are left: submissions are refused and no task starts" if is_full else "few inodes are left"
        return Finding(FAIL if is_full else WARN, f"{says}; {status.f_favail} more files can be created", fix)
    if disk.get("state") == "full" or disk.get("stalled"):
        return Finding(FAIL, f"the disk is full: submissions are refused; {size_text(free_bytes)} free", fix)
    if free_bytes < low_bytes or disk.get("state") == "low":
        says = (
            f"{size_text(free_bytes)} free of {size_text(status.f_blocks * status.f_frsize)}: this node takes no guests"
        )
        return Finding(FAIL if not free_bytes else WARN, says, fix)
    if disk and disk["reserve_bytes"] < disk["reserve_bytes_max"]:
        return Finding(WARN, "the reserve for a full disk is not filled", fix)
    return Finding(OK, f"{size_text(free_bytes)} free")


@needs_agent
def damaged(facts: DoctorInput) -> Finding:
    """Check that all tasks can be read from the database."""
    rows = facts.checkup["damaged"]
    if lost := facts.checkup.get("lost"):
        fix = "check the disk (dmesg); submit the missing tasks again; held tasks:  peerload ls, peerload release ID"
        return Finding(FAIL, str(lost), fix)
    if rows:
        says = f"{counted(len(rows), 'task')} cannot be read: {rows[0]['id']} ({rows[0]['why']})"
        fix = f"copy {shlex.quote(str(facts.info['state']))} elsewhere, check the disk (dmesg), submit the tasks again"
        return Finding(FAIL, says, fix)
    return Finding(OK, "every task can be read")


@needs_agent
def kept(facts: DoctorInput) -> Finding:
    """Check that ended tasks and their outputs were not removed soon after their end, for lack of room."""
    early = facts.checkup.get("removed_early")
    if early:
        says = f"{counted(early['tasks'], 'task')} or outputs were removed within a day of their end: {early['why']}"
        fix = (
            "peerload events --what store        keep more: ended_tasks_max, ended_output_bytes_max in the config file"
        )
        return Finding(WARN, says, fix)
    return Finding(OK, "ended tasks are kept for at least a day")


@needs_agent
def launcher(facts: DoctorInput) -> Finding:
    """Check that the launcher runs and answers."""
    told = facts.checkup["launcher"]
    if not told["pid"]:
        is_service = facts.info.get("mode") == "system"
        fix = "systemctl status peerload-launcher" if is_service else "peerload down && peerload up"
        return Finding(FAIL, "it does not run: no task starts", fix)
    if told["silent"]:
        says = f"pid {told['pid']} does not answer: no task starts, and leases are not enforced"
        return Finding(
            FAIL,
            says,
            f"kill -CONT {told['pid']}        if that does not help:  kill -9 {told['pid']}, which ends its tasks",
        )
    return Finding(OK, f"pid {told['pid']} answers")


@needs_agent
def containment(facts: DoctorInput) -> Finding:
    """Check how tasks are contained, and what that does not enforce."""
    told = facts.checkup["launcher"]
    kinds = f"tasks are contained by {told['units']}, their memory is limited by {told['memory'] or 'nothing'}"
    says = kinds + (f". Not enforced: {'; '.join(told['unenforced'])}" if told["unenforced"] else "")
    if told["units"] == "bare" or told["memory"] in (None, "rlimit"):
        return Finding(WARN, says, AS_SERVICE)
    return Finding(OK, says)


def python(facts: DoctorInput) -> Finding:
    """Check that this Python is new enough, and that the agent runs on uvloop."""
    from importlib.util import find_spec

    fix = "make setup        or:  python3.11 -m pip install peerload"
    if sys.version_info[:2] < PYTHON_MIN:
        return Finding(FAIL, f"Python {sys.version.split()[0]} is too old", fix)
    missing = [name for name in ("uvloop", "msgspec", "aiomqtt", "psutil", "cryptography") if find_spec(name) is None]
    if missing:
        return Finding(FAIL, f"packages are missing: {', '.join(missing)}", fix)
    loop = facts.checkup.get("event_loop", "uvloop")
    if loop != "uvloop":
        return Finding(WARN, f"the agent runs on {loop}, not on uvloop", fix)
    return Finding(OK, f"Python {sys.version.split()[0]}, uvloop")
