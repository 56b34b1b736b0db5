"""MPS keeper: the process that runs the MPS control daemon of one GPU as one user, and watches its servers.

The launcher starts it as that user, beside the tasks. It knows nothing of peerload and needs no packages. It writes its state,
one line of JSON, over the file that is its standard output: "device" and "owner", its arguments; "at", the time of the last check
(CLOCK_BOOTTIME); "places", the variables for clients, when the daemon answers; "clients", their pids; "faults", the number of
servers that ended or failed with clients; "why", the reason why it ends. SIGTERM ends it and the daemon.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ANSWER_S_MAX = 5.0
LOOK_S, FIRST_LOOK_S = 1.0, 0.2
"""Pauses between checks while there are servers, and before."""
PLACE_CHARS_MAX = 80
"""A socket in a directory with a longer path cannot be bound."""
PID_FILE = "nvidia-cuda-mps-control.pid"


class DaemonFailed(Exception):
    """Error: the control daemon does not carry out a command."""


class Keeper:
    """Keeper of one MPS control daemon. control: the path of its program."""

    def __init__(self, control: str, device: str, owner: str) -> None:
        self._control = control
        self.home = tempfile.mkdtemp(prefix="pl-mps-")
        if len(self.home) > PLACE_CHARS_MAX:
            Path(self.home).rmdir()
            self.home = tempfile.mkdtemp(prefix="pl-mps-", dir="/tmp")
        places = {"CUDA_MPS_PIPE_DIRECTORY": f"{self.home}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{self.home}/log"}
        for place in places.values():
            Path(place).mkdir(0o700)
        os.environ.update(places)
        self.state: dict[str, object] = {
            "device": device,
            "owner": owner,
            "at": 0.0,
            "places": {},
            "clients": [],
            "why": "",
        }
        self._faults = 0
        self._places = places
        self._servers: dict[int, int] = {}
        self._busy: set[int] = set()
        self._ended_clients: dict[int, bool] = {}

    def _ask_daemon(self, line: str = "", *flags: str) -> str:
        """Run the program, with a line for the daemon → its answer. Raises DaemonFailed."""
        try:
            done = subprocess.run(
                [self._control, *flags],
                input=f"{line}\n".encode(),
                capture_output=True,
                timeout=ANSWER_S_MAX,
                check=False,
                preexec_fn=_unblock,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DaemonFailed(f"{self._control}: {error}") from None
        output = (done.stdout + done.stderr).decode("utf-8", "replace").strip()
        if done.returncode:
            raise DaemonFailed(output.splitlines()[-1][:200] if output else f"exit code {done.returncode}")
        return done.stdout.decode("utf-8", "replace").strip()

    def start(self) -> None:
        """Start the daemon and wait for its answer. Raises DaemonFailed."""
        try:
            self._ask_daemon("", "-d")
            float(self._ask_daemon("get_default_active_thread_percentage"))
        except ValueError as error:
            raise DaemonFailed(f"the daemon does not answer: {error}") from None
        self.state["places"] = self._places

    def look(self) -> None:
        """Ask for servers and clients. Raises DaemonFailed."""
        servers, clients = set(_numbers(self._ask_daemon("get_server_list"))), []
        for pid in self._servers.keys() - servers:
            self._server_ended(pid)
        for pid in servers:
            if pid not in self._servers:
                self._busy.add(pid)
                try:
                    self._servers[pid] = os.pidfd_open(pid)
                except OSError:  # it has ended meanwhile
                    self._servers[pid] = -1
                    self._server_ended(pid)
                    continue
            of_server = _numbers(self._ask_daemon(f"get_client_list {pid}"))
            clients += of_server
            self._terminate_ended(pid, of_server)
            has_failed = bool(of_server) and self._ask_daemon(f"get_server_status {pid}").upper().endswith("FAULT")
            if has_failed and pid in self._busy:
                self._faults += 1
            if has_failed or not of_server:
                self._busy.discard(pid)
            else:
                self._busy.add(pid)
        self.state["clients"] = clients
        self._ended_clients = {pid: had_ended for pid, had_ended in self._ended_clients.items() if pid in clients}

    def _terminate_ended(self, server: int, clients: list[int]) -> None:
        """Make the server end clients whose process has ended: an endless kernel of a killed task would keep the multiprocessors
        from the others. Each was alive at an earlier check, and gone at the last two."""
        for pid in clients:
            has_ended = _has_ended(pid)
            if has_ended and self._ended_clients.get(pid):
                with contextlib.suppress(DaemonFailed):
                    self._ask_daemon(f"terminate_client {server} {pid}")
            if pid in self._ended_clients or not has_ended:
                self._ended_clients[pid] = has_ended

    def _server_ended(self, pid: int) -> None:
        if (descriptor := self._servers.pop(pid)) >= 0:
            os.close(descriptor)
        self._faults += pid in self._busy
        self._busy.discard(pid)

    def wait(self) -> None:
        """Return after a while, or when a server has ended."""
        poll = select.poll()
        for descriptor in self._servers.values():
            poll.register(descriptor, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(1000 * (LOOK_S if self._servers else FIRST_LOOK_S))}
        for pid in [pid for pid, descriptor in self._servers.items() if descriptor in ended]:
            self._server_ended(pid)

    def write_state(self) -> None:
        self.state["faults"] = self._faults
        self.state["at"] = time.clock_gettime(time.CLOCK_BOOTTIME)
        line = f"{json.dumps(self.state)}\n".encode()
        os.ftruncate(1, 0)
        os.pwrite(1, line, 0)

    def close(self) -> None:
        """End the daemon with its servers."""
        pids = [*self._servers]
        with contextlib.suppress(OSError, ValueError):
            pids.append(int(Path(self.home, "pipe", PID_FILE).read_text(encoding="ascii")))
        try:
            if self.state["places"]:
                self._ask_daemon("quit")
        except DaemonFailed:
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.home, ignore_errors=True)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split() if word.isdecimal()]


def _has_ended(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
            in "ZX"
        )
    except OSError:
        return True


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _stop(_number: int, _frame: object) -> None:
    raise SystemExit(0)


def main() -> None:
    """Keep a daemon: CONTROL DEVICE OWNER."""
    signal.signal(signal.SIGTERM, _stop)
    keeper = Keeper(*sys.argv[1:4])
    try:
        keeper.start()
        while True:
            keeper.look()
            keeper.write_state()
            keeper.wait()
            keeper.write_state()
    except DaemonFailed as error:
        keeper.state["why"] = str(error)
        keeper.write_state()
        raise SystemExit(1) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        keeper.close()


if __name__ == "__main__":
    main()
