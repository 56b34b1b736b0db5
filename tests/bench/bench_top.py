"""What `peerload top` costs with 300 nodes of eight GPUs each at one look a second: the viewer, which is the real program
on a terminal of its own, and the agent, which is a real one that was told of them, with a viewer less without one.

All nodes have news each second (the worst there is) or none has. `python tests/bench/bench_top.py`. Exit code 1 if the
viewer takes more than 10 % of a core, or the agent more than 2 %.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


from peerload.model.gossip import Load, MembershipUpdate, MemberStatus
from peerload.model.messages import KnownProfile, ProfileRequest, ProfileTold, Sync
from peerload.model.resources import Device, DeviceLoad, DeviceMode, LoadReport, Profile, Region
from tests.bench.support import arguments, cpu_s, report
from tests.core.given import identity
from tests.integration.cluster import Cluster, program
from tests.integration.fake_peer import FakePeer
from tests.support import wait_until
from tests.unit.cli.fake_agent import FakeAgent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NODES, GPUS, TASKS = 300, 8, 300
WINDOW_S = 10.0
WARM_S = 3.0
VIEWER_SHARE_MAX, AGENT_SHARE_MAX = 0.10, 0.02
COLUMNS, ROWS = 160, 50
GIB = 1 << 30


def name(number: int) -> str:
    return f"node{number:03}"


def profile(number: int) -> Profile:
    devices = tuple(
        Device(f"nvidia:GPU-{number}-{gpu}", index=gpu, model="A100", mem_bytes=80 * GIB, grantable_bytes=70 * GIB)
        for gpu in range(GPUS)
    )
    return Profile(name(number), 64, 64.0, 256 * GIB, GPUS, devices=devices, slots_fixed=True)


def load(number: int, turn: int) -> LoadReport:
    """The load of a node, another one each turn."""
    busy = (number * 7 + turn * 3) % 64
    devices = tuple(
        DeviceLoad(device.mark, DeviceMode.TIME, 4096 + gpu, 2, (busy + gpu) % 100, used_mib=700 * busy, tasks=3)
        for gpu, device in enumerate(profile(number).devices)
    )
    return LoadReport(
        load_tasks=busy, slots=64, running=busy, waiting=turn % 3, region=Region.NORMAL, accepts=True, incarnation=1,
        sequence=1 + turn, gpus=GPUS, gpu_tasks=24, devices=devices, cpus_busy=float(busy), load=busy / 64,
        mem_used_bytes=busy * GIB,
    )  # fmt: skip


# -- a terminal for the real program -----------------------------------------------------------------------------------


@contextlib.contextmanager
def viewer(socket_path: str) -> Iterator[int]:
    """`peerload top` on a terminal that somebody reads → its pid. It is ended by its own key."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "PEERLOAD_SOCKET": socket_path}
    process = subprocess.Popen(
        [*program(), "top"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    drawn = bytearray()
    reader = threading.Thread(target=_read, args=(ours, drawn), daemon=True)
    reader.start()
    try:
        wait_until(lambda: b"node001" in drawn, 30, "the nodes to be drawn")
        yield process.pid
    finally:
        with contextlib.suppress(OSError):
            os.write(ours, b"q")
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(ours)


def _read(terminal: int, drawn: bytearray) -> None:
    with contextlib.suppress(OSError):
        while piece := os.read(terminal, 1 << 16):
            drawn += piece
            if len(drawn) > 1 << 20:
                del drawn[: 1 << 19]


def used(pid: int, window_s: float) -> float:
    """The part of a core that a process takes."""
    before_s, began_s = cpu_s([pid]), time.monotonic()
    threading.Event().wait(window_s)
    return (cpu_s([pid]) - before_s) / (time.monotonic() - began_s)


# -- the viewer --------------------------------------------------------------------------------------------------------


def played_nodes(turn: int) -> list[dict[str, Any]]:
    """300 nodes as an agent tells of them."""
    return [
        {
            "node": name(number), "state": "alive", "self": number == 0, "load": (number + turn) % 9 / 4,
            "region": "normal", "cpus": 64.0, "cpus_busy": float((number * 7 + turn) % 64), "mem_bytes": 256 * GIB,
            "mem_used_bytes": (number + turn) % 256 * GIB, "tasks_running": (number + turn) % 64, "tasks_queued": 1,
            "age_s": 0.4, "incarnation": 1, "address": "10.0.0.1:7000", "drained": False, "slots": 64, "labels": ["a"],
            "speed": 1.0, "trouble": None,
            "gpus": [
                {"id": f"GPU-{number}-{gpu}", "index": gpu, "model": "A100", "mem_bytes": 80 * GIB,
                 "util": (number + gpu + turn) % 100 / 100, "mem_used_bytes": (number + turn) % 80 * GIB, "tasks": 3,
                 "mode": "time", "health": "ok"}
                for gpu in range(GPUS)
            ],
        }
        for number in range(NODES)
    ]  # fmt: skip


def played(request: Any, *, news: bool) -> dict[str, Any]:
    """The answer to `overview`."""
    number = int(request.since.rpartition(".")[2] or 0) if request.since else 0
    turn = number + 1 if news else 1
    tasks = [
        {"id": f"node000/{task}", "name": f"train-{task}", "state": "running", "node": name(task % NODES),
         "home": "node000", "cpus": 1.0, "gpus": 0, "started_at": time.time() - 60, "submitted_at": time.time() - 70,
         "command": "python train.py", "reason": "started"}
        for task in range(1, TASKS + 1)
    ]  # fmt: skip
    changed = not number or news
    events = [
        {"number": turn * 100 + at, "at": time.time(), "what": "task", "state": "running", "task": f"node000/{at}",
         "attempt": 1, "node": name(at), "reason": "started"}
        for at in range(20)
    ]  # fmt: skip
    return {
        "revision": f"boot.{number + 1}", "complete": not number,
        "agent": {"node": "node000", "policy": "adaptive", "cluster": "bench", "mqtt": None},
        "nodes": played_nodes(turn) if changed else played_nodes(turn)[:1], "nodes_gone": [],
        "tasks": tasks if changed else [], "tasks_gone": [], "guests": [], "guests_gone": [],
        "counts": {"placed": TASKS, "waiting": 0, "held": 0}, "events": events if changed else [],
    }  # fmt: skip


def viewer_share(window_s: float, rounds: int, *, news: bool) -> list[float]:
    """The part of a core that the viewer takes, of an agent that is played."""
    directory = tempfile.mkdtemp(prefix="pl-bench-", dir="/tmp")
    agent = FakeAgent(directory)
    agent.handlers["overview"] = lambda request, reply: reply.ok(**played(request, news=news))
    agent.answer("info", node="node000")
    agent.answer("tasks", tasks=[])
    agent.answer("output", id="node000/1", state="running", stdout_bytes=0, stderr_bytes=0)
    try:
        with viewer(agent.path) as pid:
            threading.Event().wait(WARM_S)
            return [used(pid, window_s) for _ in range(rounds)]
    finally:
        agent.close()
        Path(agent.path).unlink(missing_ok=True)
        Path(directory).rmdir()


# -- the agent ---------------------------------------------------------------------------------------------------------


def agent_share(window_s: float, rounds: int, *, news: bool) -> list[float]:
    """What a viewer adds to the part of a core that a real agent takes."""
    with Cluster() as cluster:
        agent = cluster.agent(slots=4)
        with FakePeer(agent.listen) as ghost:
            tell(ghost, 0, profiles=True)
            wait_until(lambda: len(agent.call("nodes")["nodes"]) >= NODES, 20, "the nodes to be known")
            stop = threading.Event()
            teller = threading.Thread(target=keep_telling, args=(ghost, stop, news))
            teller.start()
            added = []
            try:
                for _ in range(rounds):
                    without = used(agent.pid, window_s)
                    with viewer(agent.socket):
                        threading.Event().wait(WARM_S)
                        added.append(used(agent.pid, window_s) - without)
            finally:
                stop.set()
                teller.join()
            return added


def tell(ghost: FakePeer, turn: int, *, profiles: bool = False) -> None:
    """All nodes are alive, with the load of this turn."""
    rumours = tuple(
        MembershipUpdate(
            who.node, who.boot, who.machine_boot, who.store, 1, 1 + turn, MemberStatus.ALIVE, "127.0.0.1:9"
        )
        for who in (identity(name(number)) for number in range(NODES))
    )
    loads = tuple(Load.of(name(number), load(number, turn)) for number in range(NODES))
    ghost.send(Sync(rumours, loads))
    told: set[str] = set()
    while profiles and len(told) < NODES:
        asked = ghost.expect(ProfileRequest)
        numbers = [int(node.removeprefix("node")) for node in asked.nodes]
        ghost.send(ProfileTold(tuple(KnownProfile(identity(name(n)).boot, profile(n)) for n in numbers)))
        told.update(asked.nodes)


def keep_telling(ghost: FakePeer, stop: threading.Event, news: bool) -> None:
    """Answer as a node that lives; with ``news`` say each second that the load of all is another one."""
    ghost._socket.settimeout(0.1)
    turn, next_at = 0, time.monotonic() + 1.0
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            ghost._answer(ghost.receive())
        if news and time.monotonic() >= next_at:
            turn, next_at = turn + 1, next_at + 1.0
            tell(ghost, turn)


def main() -> int:
    """Measure and judge."""
    asked = arguments(__doc__ or "", rounds=3, window=(float, WINDOW_S, "seconds of each measurement (%(default)s)"))
    parts: dict[str, tuple[Callable[..., list[float]], float]] = {
        "viewer": (viewer_share, VIEWER_SHARE_MAX),
        "agent": (agent_share, AGENT_SHARE_MAX),
    }
    lines, figures, failed = [], {}, False
    for part, (measure, most) in parts.items():
        for news in (True, False):
            shares = measure(asked.window, asked.rounds, news=news)
            median = statistics.median(shares)
            what = f"{part}, {'all nodes have news each second' if news else 'nothing changes'}"
            lines.append(f"{what}: {median:.1%} of a core [{min(shares):.1%}..{max(shares):.1%}], at most {most:.0%}")
            figures[f"{part}_{'news' if news else 'still'}_share"] = median
            failed = failed or median > most
    head = f"peerload top with {NODES} nodes of {GPUS} GPUs, {COLUMNS}x{ROWS}, one look a second"
    report([head, *lines], {"nodes": NODES, "gpus": GPUS, **figures}, as_json=asked.json)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
