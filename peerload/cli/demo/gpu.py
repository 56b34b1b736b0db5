"""`peerload demo gpu`: how tasks share GPUs, on a node with four simulated ones.

The experiment is the published one of a hybrid scheduler (first come, first served, plus availability). Three tasks fill
GPU 0, and later tasks request GPU 0 too: one is small enough to run beside them, one waits for it (`queue`), and one
uses another GPU (`schedule`). Agent, launcher and tasks are real; only the cards are simulated: each task reports its use of
them in a file, in place of a driver.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import peerload
from peerload.cli.common import agent_process
from peerload.cli.common.messages import INTERRUPTED
from peerload.cli.common.options import Options
from peerload.cli.demo.demo import ANSWER_WITHIN_S, MARK, Demo, interrupt, run_and_clean, temporary_directory, wait
from peerload.client import submission
from peerload.client.connection import AgentConnection
from peerload.model.errors import PeerloadError
from peerload.security import cluster_dir
from peerload.text.format import coloured, print_result, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

NODE = "gpus"
NAME = "GPU-played-"
GPUS = 4
GPU_BYTES = 24 << 30
ENDS_WITHIN_S = 60.0
QUARTER, LITTLE = 0.25, 0.1
"""Shares of a GPU's memory: three QUARTERs and a LITTLE fit, four QUARTERs do not, since some memory is reserved."""

USE = """
import os, sys, time
directory, gate, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
used, began_s = int(os.environ["PEERLOAD_GPU_MEM_MB"]) << 20, time.monotonic()
mine = os.path.join(directory, str(os.getpid()))
with open(mine + ".new", "w") as file:
    for card in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
        print(card, used, 25, file=file)
os.replace(mine + ".new", mine)
print(os.environ["CUDA_VISIBLE_DEVICES"])
while not os.path.exists(gate):
    time.sleep(0.05)
time.sleep(max(began_s + seconds - time.monotonic(), seconds / 10))
os.unlink(mine)
"""
"""Program of each task: it occupies the requested memory on its visible cards and frees it at the end.
Even on a slow machine, it does not end before the tasks that should run beside it have started."""

COLUMNS = ("STATUS", "ID", "MODE", "PREFERRED", "GIVEN", "MEMORY", "REGISTERED", "STARTED", "ENDED")
RIGHT = ("MEMORY", "REGISTERED", "STARTED", "ENDED")

_CONFIG = 'cluster = "{cluster}"\npeer = []\nmqtt = []\nlabel = []\ndevice = []\n[gpu]\nmax_tasks = 10\n[load]\nforeign = "ignore"\n'
"""Configuration that overrides the settings of this machine."""


class DemoGpuTask(NamedTuple):
    """Task of the demonstration: its request, its duration, and what it demonstrates."""

    share: float
    mode: str
    seconds: float
    story: str


FIRST = (
    DemoGpuTask(QUARTER, "queue", 3.0, "takes a quarter of GPU 0"),
    DemoGpuTask(QUARTER, "queue", 4.0, "takes a quarter of GPU 0"),
    DemoGpuTask(QUARTER, "queue", 5.0, "takes a quarter of GPU 0"),
)
THEN = (
    DemoGpuTask(LITTLE, "queue", 1.5, "is small: it runs beside them on GPU 0"),
    DemoGpuTask(QUARTER, "queue", 1.0, "waits for GPU 0"),
    DemoGpuTask(QUARTER, "schedule", 1.0, "takes another GPU"),
)


def main(words: list[str]) -> int:
    """Run it → 0 if each task ran on the expected GPU and nothing is left behind, 1 if not."""
    flags = Options(
        "demo gpu",
        "Start an agent with four simulated GPUs on this machine; three tasks fill GPU 0, and three more ask for it: one that"
        " still fits, one that waits (queue), one that takes another (schedule). Show both queues, and remove everything.",
    ).read(words)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    demo = GpuDemo(temporary_directory(), "adaptive")
    account, left = run_and_clean(demo, lambda: demo.play(is_quiet=flags.json))
    if account is None:
        return INTERRUPTED
    account["processes_left"] = len(left)
    print_result(account, _told(account), as_json=flags.json)
    return 0 if account["as_published"] and not left else 1


class GpuDemo(Demo):
    """Demonstration of an agent with simulated GPUs: call `play`, then always `clean`."""

    nodes = (NODE,)

    def play(self, *, is_quiet: bool) -> dict[str, Any]:
        """Run the experiment → the outcome of the tasks. Raises PeerloadError."""
        info = agent_process.start(self._settings(), self._program())
        self.started |= {info["pid"], info["launcher_pid"]}
        self.started.update(self.processes())
        with AgentConnection(self.socket(NODE), timeout_s=ANSWER_WITHIN_S) as client:
            wait(lambda: len(_own(client)["gpus"]) == GPUS, "the agent does not see its GPUs")
            ids = [self._submit(client, asked) for asked in FIRST]
            wait(lambda: _are(client, ids, "running"), "the first tasks do not run")
            ids += [self._submit(client, asked) for asked in THEN]
            wait(lambda: _are(client, [ids[3], ids[5]], "running", "done", "failed"), "the next tasks do not run")
            self._gate.touch()
            if not is_quiet:
                sys.stderr.write("Work:\n" + "".join(f"{line}\n" for line in _table(_seen(client, ids))) + "\n")
            if client.call("wait", tasks=ids, timeout_s=ENDS_WITHIN_S)["timed_out"]:
                raise PeerloadError("the tasks have not all ended", why=f"{ENDS_WITHIN_S:g} s have passed")
            saw = [_output(client, task) for task in ids]
            return _account(_seen(client, ids), saw)

    def _settings(self) -> dict[str, Any]:
        made = cluster_dir.make(self.directory / "cluster", f"demo-{os.getpid()}")
        config = self.directory / "config.toml"
        config.write_text(_CONFIG.format(cluster=made.directory), encoding="utf-8")
        (self.directory / "on").mkdir()
        cards = [
            {"uuid": f"{NAME}{number}", "name": f"simulated GPU of {GPU_BYTES >> 30} GiB", "mem_bytes": GPU_BYTES}
            for number in range(GPUS)
        ]
        machine = {"gpus": cards, "processes": str(self.directory / "on")}
        (self.directory / "machine.json").write_text(json.dumps(machine), encoding="utf-8")
        return {
            "node": NODE,
            "state": str(self.directory / NODE),
            "socket": self.socket(NODE),
            "listen": "127.0.0.1:0",
            "slots": 8,
            "speed": 1,
            "policy": self.policy,
            "config": str(config),
        }

    def _program(self) -> list[str]:
        root = str(Path(peerload.__file__).resolve().parent.parent)
        places = [str(Path(peerload.__file__).parent.parent), root]
        code = f"import sys; sys.path[:0] = {places!r}; from peerload.cli.demo.gpu_agent import main; sys.exit(main())"
        return [sys.executable, "-I", "-c", code, str(self.directory / "machine.json")]

    @property
    def _gate(self) -> Path:
        return self.directory / "gate"

    def _submit(self, client: AgentConnection, asked: DemoGpuTask) -> str:
        argv = [sys.executable, "-I", "-c", USE, str(self.directory / "on"), str(self._gate), str(asked.seconds)]
        variables = {b"PATH": os.environb.get(b"PATH", os.fsencode(os.defpath)), MARK.encode(): bytes(self.directory)}
        spec = {
            "argv": [os.fsencode(word) for word in argv],
            "directory": bytes(self.directory),
            "environment": submission.packed_variables(variables),
            "request": {
                "gpus": 1,
                "gpu_fraction": asked.share,
                "gpu_prefer": ["0"],
                "gpu_wait": asked.mode,
                "cpus": 0.1,
            },
        }
        return str(client.call("submit", token=os.urandom(16).hex(), spec=spec)["id"])


def _own(client: AgentConnection) -> dict[str, Any]:
    found: dict[str, Any] = next(node for node in client.call("nodes")["nodes"] if node.get("self"))
    return found


def _are(client: AgentConnection, ids: Sequence[str], *states: str) -> bool:
    return all(task["state"] in states for task in client.call("show", tasks=list(ids))["tasks"])


def _seen(client: AgentConnection, ids: Sequence[str]) -> list[dict[str, Any]]:
    """The tasks with the columns of the published experiment; times in seconds since the first submission."""
    numbers = {gpu["id"]: gpu["index"] for gpu in _own(client)["gpus"]}
    shown = client.call("show", tasks=list(ids))["tasks"]
    zero_at = shown[0]["submitted_at"]

    def since(task: Mapping[str, Any], when: str) -> float | None:
        return round(task[when] - zero_at, 3) if task[when] else None

    return [
        {
            "status": task["state"],
            "id": task["id"],
            "mode": asked.mode,
            "preferred": [0],
            "given": [numbers[name.partition(":")[2]] for name in task["devices"]],
            "mem_bytes": int(asked.share * GPU_BYTES),
            "registered_s": since(task, "submitted_at"),
            "started_s": since(task, "started_at"),
            "ended_s": since(task, "ended_at"),
            "exit_code": task["exit_code"],
            "story": asked.story,
        }
        for asked, task in zip((*FIRST, *THEN), shown, strict=True)
    ]


def _output(client: AgentConnection, task: str) -> str:
    pieces = client.stream("output", task=task, streams=[1])
    return b"".join(piece["data"] for piece in pieces).decode("utf-8", "replace").strip()


def _account(tasks: list[dict[str, Any]], saw: Sequence[str]) -> dict[str, Any]:
    """Report of the experiment: whether each task ran on the expected GPU and saw only that one (``saw``), and how
    long the queued task waited after a GPU was free."""
    *first, little, queued, scheduled = tasks
    freed_s = min(task["ended_s"] for task in first)
    right = [task["given"] == [0] for task in (*first, little, queued)]
    right += [task["exit_code"] == 0 for task in tasks]
    right += [[f"{NAME}{number}" for number in task["given"]] == [name] for task, name in zip(tasks, saw, strict=True)]
    right += [little["started_s"] < freed_s, queued["started_s"] >= freed_s]
    right += [scheduled["started_s"] < freed_s, len(scheduled["given"]) == 1, scheduled["given"] != [0]]
    return {"tasks": tasks, "free_to_started_s": round(queued["started_s"] - freed_s, 3), "as_published": all(right)}


def _told(account: Mapping[str, Any]) -> list[str]:
    tasks = account["tasks"]
    lines = ["Finished:", *_table(tasks), ""]
    lines += [f"{task['id']} ({task['mode']}, asked for GPU 0) {task['story']}" for task in tasks[len(FIRST) :]]
    lines.append(
        f"from the end of the first to the start of the one that waited: {account['free_to_started_s'] * 1000:.0f} ms"
    )
    good = account["as_published"]
    verdict = "each task ran where expected" if good else "not every task ran where expected"
    return [*lines, coloured(verdict, "green" if good else "red", sys.stdout)]


def _table(tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} s"

    rows = [
        [
            task["status"],
            task["id"],
            task["mode"],
            ",".join(map(str, task["preferred"])),
            ",".join(map(str, task["given"])) or "-",
            f"{task['mem_bytes'] / 2**30:.1f} GiB",
            seconds(task["registered_s"]),
            seconds(task["started_s"]),
            seconds(task["ended_s"]),
        ]
        for task in tasks
    ]
    return list(table(COLUMNS, rows, RIGHT))
