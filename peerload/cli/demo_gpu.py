"""`peerload demo gpu`: an agent on a node of four imagined GPUs, and the two ways to wait for one of them.

The published experiment of hybrid scheduling (first come first served, and availability): three tasks fill GPU 0; a fourth
that wants it waits for it (`queue`) or takes another (`schedule`), and runs beside others where there is memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import peerload
from peerload.cli import environment
from peerload.cli.demo_cards import CARDS, TASK, ImaginedCards, card_name
from peerload.cli.main import INTERRUPTED
from peerload.cli.options import Options
from peerload.cli.text import coloured, print_json, table
from peerload.client import Client
from peerload.model.errors import PeerloadError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

GIB = 1 << 30
NODE = "gpus"
UP_WITHIN_S = 20.0
TASKS_WITHIN_S = 60.0
GONE_WITHIN_S = 15.0
TICK_S = 0.05
SOON_S = 1.0
"""A task that need not wait has started within this."""
HEADINGS = ("ID", "STATUS", "MODE", "PREFERRED", "MEMORY", "GIVEN", "REGISTERED", "STARTED", "ENDED")
PLAN = (
    ("queue", "0", 6.0, 4.0),
    ("queue", "0", 6.0, 5.0),
    ("queue", "0", 6.0, 6.0),
    ("queue", "0", 6.0, 1.0),
    ("schedule", "0", 6.0, 3.0),
    ("queue", "3", 6.0, 3.0),
    ("queue", "3", 2.0, 2.0),
)
"""(mode, the preferred GPU, GiB, seconds) of each task."""
STORY = (
    "tasks 1 to 3 fill GPU 0",
    "task 4 wants GPU 0 and nothing else: it waits for the first of them to end",
    "task 5 prefers GPU 0 and takes another",
    "task 7 wants GPU 3, where task 6 is: there is memory for both",
)


def main(words: list[str]) -> int:
    """Run the demo: 0 if every task had the GPU that it should, 1 if not."""
    reader = Options("demo gpu", "Start an agent on four imagined GPUs, and show the two ways to wait for one of them.")
    flags = reader.read(words)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    demo = GpuDemo(Path(tempfile.mkdtemp(prefix="pl-gpu-", dir="/tmp")))
    try:
        account = demo.run(is_json=flags.json)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        demo.clean()
    if flags.json:
        print_json(account)
    else:
        good = account["as_expected"]
        verdict = "every task had the GPU that it should" if good else f"not as it should be: {account['wrong']}"
        sys.stdout.write(f"\n{coloured(verdict, 'green' if good else 'red', sys.stdout)}\n")
    return 0 if account["as_expected"] else 1


class GpuDemo:
    """One demonstration in one directory: `run`, then always `clean`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._cards = directory / "cards"
        self._socket = str(directory / "sock")
        self._agent: subprocess.Popen[bytes] | None = None

    def run(self, *, is_json: bool) -> dict[str, Any]:
        """Start the agent, have the tasks run, and return the account. Raises PeerloadError."""
        self._start()
        with Client(self._socket) as client:
            _until(lambda: _are_read(client), "the GPUs are not read", UP_WITHIN_S)
            sys.stderr.write(
                f"An agent with {CARDS} imagined GPUs of 24 GiB.\n" + "".join(f"  {line}\n" for line in STORY)
            )
            ids = [self._submit(client, mode, prefer, gib, seconds) for mode, prefer, gib, seconds in PLAN]
            _until(
                lambda: _started(self._shown(client, ids)) >= len(PLAN) - 1, "the tasks do not start", TASKS_WITHIN_S
            )
            self._print("work", self._shown(client, ids), is_json=is_json)
            _until(
                lambda: all(task["ended_at"] for task in self._shown(client, ids)),
                "the tasks do not end",
                TASKS_WITHIN_S,
            )
            tasks = self._shown(client, ids)
            self._print("finished", tasks, is_json=is_json)
            wrong = self._wrong(tasks, [self._output(client, task) for task in ids])
        rows = [
            dict(zip([name.lower() for name in HEADINGS], self._row(task, tasks[0]), strict=True)) for task in tasks
        ]
        return {"tasks": rows, "as_expected": not wrong, "wrong": "; ".join(wrong)}

    def _start(self) -> None:
        self._cards.mkdir()
        places = [str(Path(peerload.__file__).parent.parent), *sys.path[1:]]
        code = f"import sys; sys.path[:0] = {places!r}; from peerload.cli.demo_gpu import agent; agent({str(self.directory)!r})"
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PEERLOAD_")}
        with (self.directory / "log").open("wb") as log:
            self._agent = subprocess.Popen(  # noqa: S603 -- ourselves
                [sys.executable, "-I", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables,
                cwd="/",
                start_new_session=True,
            )
        _until(self._answers, "the agent does not start", UP_WITHIN_S)

    def _answers(self) -> bool:
        assert self._agent is not None
        if self._agent.poll() is not None:
            raise PeerloadError("the agent has ended", why=self._last_words())
        with contextlib.suppress(PeerloadError), Client(self._socket) as client:
            return bool(client.call("info"))
        return False

    def _last_words(self) -> str:
        lines = (self.directory / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1] if lines else ""

    def _submit(self, client: Client, mode: str, prefer: str, gib: float, seconds: float) -> str:
        words = [sys.executable, "-I", "-c", TASK, str(self._cards), str(gib), str(seconds)]
        request = {"gpus": 1, "gpu_mem_bytes": int(gib * GIB), "gpu_prefer": [prefer], "gpu_wait": mode, "cpus": 0.5}
        spec = {
            "argv": [os.fsencode(word) for word in words],
            "directory": os.fsencode(self.directory),
            "environment": environment.packed({b"PATH": os.fsencode(os.defpath)}),
            "name": f"{mode}-{prefer}",
            "request": request,
        }
        return str(client.call("submit", token=os.urandom(16).hex(), spec=spec)["id"])

    def _shown(self, client: Client, ids: Sequence[str]) -> list[dict[str, Any]]:
        tasks: list[dict[str, Any]] = client.call("show", tasks=list(ids))["tasks"]
        return tasks

    def _output(self, client: Client, task: str) -> str:
        pieces = client.stream("output", task=task, streams=[1])
        return b"".join(piece["data"] for piece in pieces).decode("utf-8", "replace").strip()

    def _given(self, task: dict[str, Any]) -> str:
        names = {f"nvidia:{card_name(self._cards, number)}": str(number) for number in range(CARDS)}
        return ",".join(names.get(device, device) for device in task.get("devices") or []) or "-"

    def _row(self, task: dict[str, Any], first: dict[str, Any]) -> list[str]:
        def since(instant: float | None) -> str:
            return "-" if not instant else f"{instant - first['submitted_at']:.2f} s"

        status = {"queued": "waiting", "leased": "ready", "done": "ok"}.get(task["state"], task["state"])
        return [
            str(task["id"]),
            status,
            str(task["gpu_wait"]),
            ",".join(task["gpu_prefer"]),
            f"{task['gpu_mem_bytes'] / GIB:g} GiB",
            self._given(task),
            since(task["submitted_at"]),
            since(task["started_at"]),
            since(task["ended_at"]),
        ]

    def _print(self, what: str, tasks: Sequence[dict[str, Any]], *, is_json: bool) -> None:
        rows = [self._row(task, tasks[0]) for task in tasks]
        out = sys.stderr if what == "work" or is_json else sys.stdout
        out.write(f"\n{what}\n" + "".join(f"  {line}\n" for line in table(HEADINGS, rows)))
        out.flush()

    def _wrong(self, tasks: Sequence[dict[str, Any]], outputs: Sequence[str]) -> list[str]:
        """What is not as it should be, in words."""
        found = []
        waited_s = [task["started_at"] - task["submitted_at"] for task in tasks]
        for number, (task, output) in enumerate(zip(tasks, outputs, strict=True), start=1):
            mode, prefer = PLAN[number - 1][:2]
            given = self._given(task)
            if (given == prefer) != (mode == "queue"):
                found.append(f"task {number} was given GPU {given}")
            if output != card_name(self._cards, int(given)) if given.isdecimal() else True:
                found.append(f"task {number} saw {output or 'nothing'}")
            if (waited_s[number - 1] > SOON_S) != (number == len(PLAN) - 3):
                found.append(f"task {number} has waited for {waited_s[number - 1]:.1f} s")
        return found

    def clean(self) -> None:
        """End all that was started and remove the directory."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(PeerloadError), Client(self._socket, timeout_s=GONE_WITHIN_S) as client:
            client.call("stop", all=True)
        if self._agent is not None:
            try:
                self._agent.wait(GONE_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._agent.kill()
                self._agent.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def agent(directory: str) -> None:
    """Be the agent of the demo, with the imagined GPUs."""
    from peerload.agent import cluster
    from peerload.agent.main import serve
    from peerload.model.config import AgentConfig

    base = Path(directory)
    made = cluster.make(base / "cluster", f"demo-{os.getpid()}")
    config = AgentConfig(
        node=NODE,
        state=str(base / "state"),
        socket=str(base / "sock"),
        slots=16,
        speed=1.0,
        cluster=str(made.directory),
    )
    sys.exit(serve(config, ImaginedCards(base / "cards")))


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _until(predicate: Any, otherwise: str, within_s: float) -> None:  # noqa: ANN401 -- a function without arguments
    """Return as soon as it is true. Raises PeerloadError saying ``otherwise``."""
    pause, deadline_s = threading.Event(), time.monotonic() + within_s
    while not predicate():
        if time.monotonic() > deadline_s:
            raise PeerloadError(otherwise, why=f"{within_s:g} s have passed")
        pause.wait(TICK_S)


def _are_read(client: Client) -> bool:
    gpus = client.call("nodes")["nodes"][0]["gpus"]
    return len(gpus) == CARDS and all(gpu["health"] == "ok" for gpu in gpus)


def _started(tasks: Sequence[dict[str, Any]]) -> int:
    return sum(bool(task["started_at"]) for task in tasks)
