"""A machine: namespaces with an agent in them, that can be crashed as a whole and booted anew.

Its first process keeps a network, mount, process and time namespace. When that is killed the kernel ends everything in
it at once, as a power cut would; what lies on disk stays. Each boot has a new machine boot id, and a CLOCK_BOOTTIME and
a wall clock of its own. Pids are those seen from outside.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from peerload.client.connection import AgentConnection
from peerload.model.errors import AgentUnavailable, PeerloadError
from tests.chaos_real.cgroups import Cgroups, to_hide
from tests.chaos_real.network import NAMESPACES, command
from tests.integration.cluster import PATH, program
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MARK = "plc"
"""With this the directory of a campaign begins, then comes the process that made it."""
DISK = "peerload-chaos"
BOOT_S_MAX = 30.0
UP_S_MAX = 60.0
STOP_S_MAX = 40.0
ANSWER_S_MAX = 5.0
_FIRST = """
mount --bind "$1" /proc/sys/kernel/random/boot_id || exit 1
: >"$2"
shift 2
for place; do umount --lazy "$place"; done
trap '' CHLD
exec cat
"""
"""The first process: ignoring SIGCHLD makes the kernel reap what is left to it; it ends when its stdin does."""


def send(pid: int, number: signal.Signals) -> None:
    """A signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, number)


def remove_abandoned_disks() -> None:
    """Unmount what was mounted by runs whose process is no more."""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        found = re.match(rf"{DISK} (/\S+/{MARK}-(\d+)-\S+) ", line)
        if found and not Path(f"/proc/{found[2]}").exists():
            command("umount", "--lazy", found[1])


def _status(pid: str) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def _child(parent: int) -> int:
    """The first child of a process, 0 if it has none."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and _status(path.name).get("PPid") == str(parent):
            return int(path.name)
    return 0


class Machine:
    """One node of the network and its agent, with a new directory. ``busy`` is held by the fault it is under."""

    def __init__(
        self,
        directory: Path,
        node: str,
        namespace: str,
        words: Sequence[str],
        *,
        disk_bytes: int = 0,
        freezer: str = "cgroup2",
        start: Sequence[str] = (),
        wall: Path,
    ) -> None:
        self.node = node
        self.directory = directory
        self.directory.mkdir(mode=0o700)
        self.state = self.directory / "state"
        self.state.mkdir(mode=0o700)
        self.socket = str(self.directory / "sock")
        self.log = self.directory / "log"
        self.busy = threading.Lock()
        self.boots = 0
        self.disk_bytes = disk_bytes
        self.wall_offset_s = 0
        self.may_end = False
        """Whether the fault it is under may end its agent."""
        self.own_ends: list[str] = []
        """Ends of its agent that nobody brought about."""
        self._namespace = NAMESPACES / namespace
        self._words = list(words)
        self._wall = wall
        self._start = start or program()
        self._hidden = to_hide(freezer)
        self._cgroups = Cgroups(namespace)
        self._holder: subprocess.Popen[bytes] | None = None
        self._agent: subprocess.Popen[bytes] | None = None
        self._first_pid = 0
        if disk_bytes:
            command("mount", "-t", "tmpfs", "-o", f"size={disk_bytes},mode=0700", DISK, str(self.state))

    # -- the machine ---------------------------------------------------------------------------------------------------

    def boot(self, boottime_offset_s: int = 0) -> None:
        """Switch it on; its agent is not started by that."""
        self.boots += 1
        boot_id, ready = self.directory / "boot_id", self.directory / f"booted-{self.boots}"
        boot_id.write_text(f"{uuid.uuid4()}\n", encoding="ascii")
        self._cgroups.make()
        words = [
            *("nsenter", f"--net={self._namespace}", "unshare", "--mount", "--propagation", "private"),
            *("--pid", "--fork", "--kill-child", "--mount-proc", "--time", "--boottime", str(boottime_offset_s)),
            *("sh", "-c", _FIRST, self.node, str(boot_id), str(ready), *self._hidden),
        ]
        with (self.directory / "boots").open("ab") as log:
            self._holder = subprocess.Popen(self._cgroups.enter(*words), stdin=subprocess.PIPE, stderr=log, cwd="/")
        wait_until(ready.exists, BOOT_S_MAX, f"{self.node} to boot")
        self._first_pid = _child(self._holder.pid)
        assert self._first_pid

    def crash(self) -> None:
        """End everything that runs on it at once: the kernel does, with the first process. Killed one by one, a launcher
        that lives a moment longer would record the ends of its tasks."""
        send(self._first_pid, signal.SIGKILL)
        if self._agent is not None:
            send(
                self._agent.pid, signal.SIGKILL
            )  # nsenter stops with a paused agent, whose end it then does not collect
        if self._holder is not None:
            assert self._holder.stdin is not None
            self._holder.stdin.close()
            self._holder.wait(BOOT_S_MAX)
            self._holder = None
        if self._agent is not None:
            self._agent.wait(BOOT_S_MAX)
            self._agent = None
        self._cgroups.remove()

    @property
    def is_on(self) -> bool:
        """Whether it has been switched on and not crashed."""
        return self._holder is not None

    def close(self) -> None:
        """Switch it off, and give its disk back; the directory stays."""
        self.crash()
        if self.disk_bytes:
            kept = self.directory / "disk"
            command("cp", "-a", str(self.state), str(kept))
            command("umount", "--lazy", str(self.state))
            self.state.rmdir()
            kept.rename(self.state)
            self.disk_bytes = 0

    def enter(self, *words: str) -> list[str]:
        """The command line that runs ``words`` on this machine."""
        namespaces = ["--net", "--mount", "--pid", "--time"]
        return self._cgroups.enter("nsenter", f"--target={self._first_pid}", *namespaces, "--", *words)

    # -- its agent -----------------------------------------------------------------------------------------------------

    def spawn(self, more: Iterable[str] = ()) -> None:
        """Start the agent; it is not ready yet. One that has ended by itself is kept in `own_ends`."""
        if self._agent is not None and not self.may_end:
            self.own_ends.append(f"{self.node} ended with {self._agent.wait(BOOT_S_MAX)}:\n{self.log_end()}")
        environment = {"PATH": PATH, "HOME": str(self.directory), "PEERLOAD_SPEED": "1"}
        environment["PEERLOAD_LOAD_FOREIGN"] = "ignore"
        clock = [f"LD_PRELOAD={self._wall}", f"WALL_OFFSET_S={self.wall_offset_s}"] if self.wall_offset_s else []
        words = [
            *("env", *clock, *self._start, "agent", "--node", self.node, "--state", str(self.state)),
            *("--socket", self.socket, *self._words, *more),
        ]
        with self.log.open("ab") as log:
            self._agent = subprocess.Popen(
                self.enter(*words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd="/",
                start_new_session=True,
            )

    def start(self) -> None:
        """Start the agent, again and again as a service manager would, and return when it answers."""
        if not self.runs:
            self.spawn()
        wait_until(self._answers, UP_S_MAX, f"{self.node} to answer; it said:\n{self.log_end()}")

    def _answers(self) -> bool:
        if not self.runs:
            self.spawn()
        with contextlib.suppress(PeerloadError):
            return bool(self.call("info", timeout_s=ANSWER_S_MAX))
        return False

    @property
    def runs(self) -> bool:
        """Whether its agent is there."""
        return self._agent is not None and self._agent.poll() is None

    @property
    def agent_pid(self) -> int:
        """Its agent's process, 0 if there is none."""
        return 0 if self._agent is None or self._agent.poll() is not None else _child(self._agent.pid)

    @property
    def launcher_pid(self) -> int:
        """Its launcher's process, 0 if there is none."""
        try:
            inside = (self.state / "launcher" / "launcher.pid").read_text(encoding="ascii").strip()
            space = Path(f"/proc/{self._first_pid}/ns/pid").readlink()
        except OSError:
            return 0
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if (
                    path.name.isdigit()
                    and (path / "ns/pid").readlink() == space
                    and _status(path.name).get("NSpid", "").split()[-1:] == [inside]
                ):
                    return int(path.name)
        return 0

    def kill(self) -> None:
        """kill -9 of the agent alone."""
        send(self.agent_pid, signal.SIGKILL)
        if self._agent is not None:
            self._agent.wait(BOOT_S_MAX)
            self._agent = None

    def pause(self) -> None:
        """Freeze the agent alone."""
        send(self.agent_pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on; nsenter has stopped itself with it."""
        if self._agent is not None and self._agent.poll() is None:
            send(_child(self._agent.pid), signal.SIGCONT)
            send(self._agent.pid, signal.SIGCONT)

    def stop(self, *, ends_tasks: bool = False) -> None:
        """Ask it to stop, as `peerload down` does, and wait for its end."""
        with contextlib.suppress(AgentUnavailable):
            self.call("stop", all=ends_tasks)
        if self._agent is not None:
            code = self._agent.wait(STOP_S_MAX)
            if code and not self.may_end:
                self.own_ends.append(f"{self.node} was told to stop and ended with {code}:\n{self.log_end()}")
            self._agent = None

    def call(self, verb: str, *, timeout_s: float = 30.0, **fields: object) -> dict[str, Any]:
        """One request to the agent. Raises AgentUnavailable."""
        with AgentConnection(self.socket, timeout_s=timeout_s) as client:
            return client.call(verb, **fields)

    def log_end(self) -> str:
        """What it said last."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-3000:] if self.log.exists() else ""

    # -- its disk ------------------------------------------------------------------------------------------------------

    def fill_disk(self) -> None:
        """Leave no byte on the disk that its state lies on."""
        with (self.state / "filler").open("ab") as file:
            room = os.fstatvfs(file.fileno())
            for size in (room.f_bavail * room.f_frsize, 1 << 20, 1 << 16, 1 << 12, 1 << 12):
                with contextlib.suppress(OSError):
                    os.posix_fallocate(file.fileno(), file.tell(), size)
                    file.seek(0, os.SEEK_END)

    def free_disk(self) -> None:
        """Give it back."""
        (self.state / "filler").unlink(missing_ok=True)


def spec(words: Sequence[str], **fields: object) -> dict[str, object]:
    """A task's spec as the control socket takes it."""
    return {
        "argv": [word.encode() for word in words],
        "directory": b"/tmp",
        "environment": msgpack.packb({b"PATH": PATH.encode()}),
        **fields,
    }
