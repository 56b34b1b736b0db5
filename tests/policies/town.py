"""A few real nodes in one process, unlike one another, on a heap: what a policy does to a cluster, action by action.

Of six nodes three are alike; n4 is larger and has a label that some tasks ask for; n5 is drained; n6 was met and is silent
since, so that it is suspected. Nothing here knows of any policy or of any message that policies bring about.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from typing import Any

import msgspec

from peerload.core.membership.gossip import rumour_of
from peerload.core.node import Node
from peerload.model import actions, events, messages, timers
from peerload.model.config import CoreConfig
from peerload.model.events import Instant
from peerload.model.gossip import LAN, MemberStatus
from peerload.model.messages import Identity
from peerload.model.resources import LoadReport, Placement, Profile, ResourceRequest
from peerload.model.task import SCRATCH, Exit, TaskSpec
from peerload.policy.preset import PolicySet
from peerload.wire import peer as codec

WALL_S = 1_000_000.0
DELAY_S = 0.001
UNTIL_S = 300.0
TASKS = 40
BURST_SHARE = 0.7
"""Of them come at one moment, at two homes, so that some must wait or move; the others one by one after these."""

PROFILES = {
    profile.node: profile
    for profile in (
        Profile("n1", 1, 1.0, slots_fixed=True),
        Profile("n2", 1, 1.0, slots_fixed=True),
        Profile("n3", 1, 1.0, slots_fixed=True),
        Profile("n4", 2, 2.0, slots_fixed=True, labels=("big",)),
        Profile("n5", 4, 4.0, slots_fixed=True, labels=("big",), drained=True),
        Profile("n6", 4, 4.0, slots_fixed=True, labels=("big",)),
    )
}
SILENT = "n6"
NEVER_S = 1e6
CONFIG = CoreConfig(gossip=msgspec.structs.replace(LAN, probe_s=NEVER_S, sync_s=NEVER_S))
"""Nobody is probed: who is there stays as it was told."""
UNUSABLE = ("n5", "n6")
PECULIAR = (
    {"placement": Placement(labels=("big",))},
    {"request": ResourceRequest(cpus=2.0)},
    {"placement": Placement(exclude=("n3", "n4"))},
    {"placement": Placement(local=True)},
    {"placement": Placement(node="n3")},
    {"placement": Placement(migrations_max=0)},
    {"request": ResourceRequest(cpus=0.5), "priority": 5},
)
"""What some tasks ask for; the rest run anywhere."""

Watch = Callable[[str, actions.Action], None]


def identity(name: str) -> Identity:
    return Identity(name, f"{name}-boot-1", f"{name}-machine-1", f"{name}-store", 1, f"{name}:1")


class Town:
    """``policies(node)``: what that node plays; ``watch`` sees every action as it is wanted. `run` plays one seed."""

    def __init__(
        self,
        policies: Callable[[str], PolicySet],
        seed: int,
        watch: Watch = lambda _node, _action: None,
        tasks: int = TASKS,
    ) -> None:
        self.now_s = 0.0
        self.tasks = tasks
        self.ended: dict[str, str] = {}
        self.decided: list[actions.Decided] = []
        self._watch = watch
        self._digest = hashlib.sha256()
        self._world = random.Random(f"{seed} world")
        self._heap: list[tuple[float, int, str, events.Event]] = []
        self._sequence = 0
        self._timers: dict[tuple[str, timers.Timer], float] = {}
        self.nodes = {
            name: Node(CONFIG, policies(name), identity(name), profile, random.Random(f"{seed} {name}"))
            for name, profile in PROFILES.items()
            if name != SILENT
        }
        for name in self.nodes:
            self._put(0.0, name, events.AgentStarted())
            for other, profile in PROFILES.items():
                if other != name:
                    self._put(0.0, name, events.PeerMet(identity(other), profile, LoadReport()))
            suspected = msgspec.structs.replace(
                rumour_of(identity(SILENT), PROFILES[SILENT], 0), standing=MemberStatus.SUSPECT, by=("far",)
            )
            self._put(0.001, name, events.GossipReceived("far", "far-boot-1", (suspected,)))
        self._workload()

    def _workload(self) -> None:
        at_s = 0.01
        burst = int(self.tasks * BURST_SHARE)
        for number in range(self.tasks):
            home = ("n1", "n2")[number % 2] if number < burst else self._world.choice(("n1", "n2", "n3", "n4"))
            if number >= burst:
                at_s += self._world.expovariate(10.0)
            wants: dict[str, Any] = dict(PECULIAR[number // 2 % len(PECULIAR)]) if number % 3 == 0 else {}
            spec = TaskSpec((b"task",), SCRATCH, **wants)
            self._put(at_s, home, events.TaskSubmitted(number + 1, f"token {number}", b"digest", spec))

    @property
    def digest(self) -> str:
        """Of everything that every node was told and wanted done, in order."""
        return self._digest.hexdigest()

    def count(self, name: str) -> int:
        return sum(node.state.counts.get(name, 0) for node in self.nodes.values())

    def run(self) -> Town:
        while self._heap and self.now_s < UNTIL_S and len(self.ended) < self.tasks:
            self.now_s, _, name, event = heapq.heappop(self._heap)
            if isinstance(event, events.TimerExpired):
                if self._timers.get((name, event.timer)) != self.now_s:
                    continue
                del self._timers[name, event.timer]
            self._digest.update(f"{self.now_s:.9f} {name} {event!r}\n".encode())
            done = self.nodes[name].handle(Instant(self.now_s + 100.0, WALL_S + self.now_s), event)
            for action in done:
                self._digest.update(f"{action!r}\n".encode())
                self._watch(name, action)
                self._perform(name, action)
        return self

    # -- doing what is wanted --------------------------------------------------------------------------------------------

    def _put(self, at_s: float, name: str, event: events.Event) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at_s, self._sequence, name, event))

    def _soon(self, name: str, event: events.Event) -> None:
        self._put(self.now_s, name, event)

    def _send(self, src: str, dst: str, message: Any) -> None:
        if dst in self.nodes:
            envelope = messages.Envelope(1, "town", src, "boot", 1, message)
            assert codec.decode(codec.encode(envelope)) == envelope
            delay_s = DELAY_S * (1.0 + self._world.random())
            self._put(self.now_s + delay_s, dst, events.MessageReceived(src, message))

    def _perform(self, name: str, action: actions.Action) -> None:  # noqa: C901 PLR0912 -- one line an action
        match action:
            case actions.Send():
                self._send(name, action.dst, action.message)
            case actions.Announce():
                (message,) = msgspec.structs.astuple(action)
                for other in self.nodes:
                    if other != name:
                        self._send(name, other, message)
            case actions.SetTimer():
                at_s = max(action.at_s - 100.0, self.now_s)
                self._timers[name, action.timer] = at_s
                self._put(at_s, name, events.TimerExpired(action.timer))
            case actions.ClearTimer():
                self._timers.pop((name, action.timer), None)
            case actions.SpawnTask():
                self._soon(name, events.TaskStarted(action.key, WALL_S + self.now_s))
                took_s = self._world.expovariate(8.0)
                exit_ = Exit(0, started_at=WALL_S + self.now_s, ended_at=WALL_S + self.now_s + took_s)
                self._put(self.now_s + took_s, name, events.TaskEnded(action.key, exit_))
            case actions.SendResult():
                self._send(
                    name, action.dst, messages.Result(action.task, action.uid, action.attempt, action.exit, inline=True)
                )
            case actions.KeepOutput() | actions.FetchOutput():
                self._soon(name, events.OutputArrived(action.uid, action.attempt))
            case actions.Answer():
                assert action.error is None, action.error
            case actions.TaskChanged():
                if action.record.state.is_final:
                    self.ended[action.record.task] = action.record.state.value
            case actions.Decided():
                self.decided.append(action)
            case _:
                pass
