"""What the trial's steps work with: commands, units of systemd, tasks, and the cgroups that tasks are in."""

from __future__ import annotations

import hashlib
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

WITHIN_S = 400.0
"""Whatever is waited for is there by then, on an emulated processor that has other work, too."""
SH_S_MAX = 900.0
LOOK_S = 0.2
HERE = "/trial/deploy"
NODE = "trial"
CONFIG = Path("/etc/peerload/peerload.toml")
MORE_CONFIG = Path("/etc/peerload/conf.d/trial.toml")
DROP_IN = Path("/etc/systemd/system/peerload.service.d/trial.conf")
CGROUPS = Path("/sys/fs/cgroup")


def sh(*words: str, user: str = "", fails: bool = False) -> str:
    """Run a command, as a user → what it has printed; it must succeed, unless it ``fails``: then its stderr, too."""
    before = ["runuser", "-u", user, "--"] if user else []
    done = subprocess.run([*before, *words], capture_output=True, text=True, check=False, cwd="/", timeout=SH_S_MAX)
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, f"{words} ended with {done.returncode}: {said[-1500:]}"
    return said if fails else done.stdout


def wheel(name: str) -> str:
    """The file of a version, for deploy/install, which finds what it would make of it in its place: made of it before this machine
    was started, since that takes an emulated processor minutes."""
    (found,) = Path("/trial", name).glob("*.whl")
    pins = Path(HERE, "requirements.txt").read_bytes()
    mark = hashlib.sha256(found.read_bytes() + pins).hexdigest()[:12]
    made, place = Path("/trial/made", mark), Path("/opt/peerload/versions", mark)
    if made.is_dir() and not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        (place.parents[1] / ".peerload-install").touch()  # else deploy/install takes it for somebody else's
        made.rename(place)
    return str(found)


def until(found: Callable[[], object], what: str) -> None:
    """Return as soon as it is so."""
    deadline_s = time.monotonic() + WITHIN_S
    while not found():
        assert time.monotonic() < deadline_s, f"not within {WITHIN_S:g} s: {what}"
        time.sleep(LOOK_S)


def of(unit: str, name: str) -> str:
    """A property of a unit."""
    return sh("systemctl", "show", "--property", name, "--value", unit).strip()


def main_pid(unit: str = "peerload.service") -> int:
    """Its process."""
    return int(of(unit, "MainPID"))


def is_up() -> bool:
    """Whether the agent has said that it is."""
    return of("peerload.service", "ActiveState") == "active" and main_pid() > 0


def process(pattern: str) -> int:
    """The first process whose command line is like this; 0 if there is none."""
    found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=False).stdout.split()
    return int(found[0]) if found else 0


def task_pid(mark: str) -> int:
    """The process of the task whose command is `sleep MARK`; 0 if there is none."""
    return process(f"^sleep {mark}$")


def a_task(mark: str, *flags: str) -> int:
    """Have one of alice's started that runs for long → its process."""
    sh("peerload", "submit", *flags, "sleep", mark, user="alice")
    until(lambda: task_pid(mark), f"sleep {mark} to run")
    return task_pid(mark)


def no_more(mark: str) -> None:
    """Have alice's last task, which is this one, ended."""
    sh("peerload", "cancel", "@", user="alice")
    until(lambda: not task_pid(mark), f"sleep {mark} to end")


def cgroup(pid: int) -> Path:
    """The directory of the cgroup that a process is in."""
    return CGROUPS / Path(f"/proc/{pid}/cgroup").read_text().strip().rpartition("::/")[2]


def value(pid: int, name: str) -> str:
    """What a file of this process's cgroup says."""
    return (cgroup(pid) / name).read_text().strip()


def count(path: Path, name: str) -> int:
    """The number behind a name, in a file of such lines."""
    lines = (line.split() for line in path.read_text().splitlines())
    return next(int(words[1]) for words in lines if words[0] == name)


def systemd_version() -> int:
    """Of the one that runs this machine."""
    return int(sh("systemctl", "--version").split()[1])
