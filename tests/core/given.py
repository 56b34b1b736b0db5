"""Given a node with so many slots, peers and tasks; then one event; then the exact list of what it did, in order."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from peerload.core.node import Node
from peerload.core.work import HomeTask
from peerload.model import actions, events, messages, timers
from peerload.model.config import CoreConfig
from peerload.model.events import Instant
from peerload.model.gossip import GossipMessage, MembershipUpdate, MemberStatus
from peerload.model.messages import Identity
from peerload.model.resources import LoadReport, Placement, Profile, ResourceRequest
from peerload.model.task import SCRATCH, Exit, TaskSpec
from peerload.model.timers import timer
from peerload.policy.preset import PolicySet
from peerload.policy.registry import build_preset
from tests.core.invariants import validate

SENDER: dict[str, Any] = {"transfer": {"threshold": 1.0}, "location": {"sender": {"policy": "threshold"}}}
RECEIVER: dict[str, Any] = {"transfer": {"threshold": 1.0}, "location": {"receiver": {"policy": "poll"}}}
ALONE: dict[str, Any] = {"transfer": {"threshold": 1.0}}
WALL_S = 1_000_000.0
ACCEPTS = LoadReport(slots=1, accepts=True, incarnation=1, sequence=1)
UID = bytes(range(16))


def identity(name: str, start: int = 1, machine: int = 1) -> Identity:
    return Identity(name, f"{name}-boot-{start}", f"{name}-machine-{machine}", f"{name}-store", start, f"{name}:1")


def spec(**changes: Any) -> TaskSpec:
    return TaskSpec((b"true",), changes.pop("directory", SCRATCH), **changes)


class Given:
    """A node named ``x`` (or as said) with ``peers``; time stands still unless ``after`` moves it."""

    def __init__(
        self,
        *,
        slots: int = 1,
        peers: tuple[str, ...] = ("y",),
        policies: Mapping[str, Any] | PolicySet = ALONE,
        node: str = "x",
        config: CoreConfig | None = None,
        started: events.AgentStarted | None = None,
        labels: tuple[str, ...] = (),
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.at_s = 100.0
        self.shows_gossip = False
        self.validates = True
        has = {"cpus": float(slots), "slots_fixed": True, "labels": labels, **facts}
        self.profile = Profile(node, slots, **has)
        self.requests = 0
        preset = policies if isinstance(policies, PolicySet) else build_preset("given", dict(policies))
        self.node = Node(config or CoreConfig(), preset, identity(node), self.profile, random.Random(1))
        self.last: list[actions.Action] = []
        self.notes: list[actions.PutEvent] = []  # what people are told; apart, since nothing depends on it
        self.started = self.when(started or events.AgentStarted())
        for peer in peers:
            self.meet(peer)

    def when(self, event: events.Event) -> list[str]:
        """The shape of what is done about this event."""
        done = self.node.handle(Instant(self.at_s, WALL_S + self.at_s), event)
        if self.validates:
            validate(self.node)
        self.notes = [action.event for action in done if isinstance(action, actions.Note)]
        self.last = [action for action in done if not isinstance(action, actions.Note)]
        assert_durable_first(self.last)
        return [self._shape(action) for action in self.last if self.shows_gossip or not is_gossip(action)]

    def after(self, seconds: float) -> Given:
        self.at_s += seconds
        return self

    def hear(self, src: str, message: Any, *, directory_here: bool = True) -> list[str]:
        return self.when(events.MessageReceived(src, message, directory_here))

    def timer(self, *name: str) -> list[str]:
        return self.when(events.TimerExpired(timer(*name)))

    def meet(self, peer: str, *, start: int = 1, machine: int = 1, retained: bool = False, **profile: Any) -> list[str]:
        facts = {"slots": 1, "cpus": 1.0, "slots_fixed": True, **profile}
        met = events.PeerMet(identity(peer, start, machine), Profile(peer, **facts), LoadReport(), retained=retained)
        return self.when(met)

    def rumour(self, peer: str, standing: MemberStatus, refutation: int = 0, start: int = 1) -> list[str]:
        """Somebody far away says this of a peer."""
        who = identity(peer, start)
        said = MembershipUpdate(
            who.node, who.boot, who.machine_boot, who.store, start, refutation, standing, who.address
        )
        return self.when(events.GossipReceived("far", "far-boot-1", (said,)))

    def submit(self, task: TaskSpec | None = None, token: str = "", **event: Any) -> list[str]:
        self.requests += 1
        token = token or f"token {self.requests}"
        digest = event.pop("digest", b"digest")
        return self.when(events.TaskSubmitted(self.requests, token, digest, task or spec(), **event))

    def finish(self, request: int) -> list[str]:
        """The turns that a request about many tasks still takes."""
        did: list[str] = []
        while actions.SetTimer(timers.Batch(str(request)), self.at_s) in self.last:
            did += self.timer("request", str(request))
        return did

    def task(self, number: int = 1) -> HomeTask:
        return self.node.home.by_id[f"{self.profile.node}/{number}"]

    def sent(self, kind: type[Any]) -> Any:
        """The last message of this kind that the last event made it send."""
        return [act.message for act in self.last if isinstance(act, actions.Send) and isinstance(act.message, kind)][-1]

    def done(self, kind: type[Any]) -> Any:
        return [action for action in self.last if isinstance(action, kind)][-1]

    def end(self, key: str, exit_code: int = 0) -> list[str]:
        return self.when(events.TaskEnded(key, Exit(exit_code, started_at=WALL_S, ended_at=WALL_S + 1.0)))

    def _shape(self, action: actions.Action) -> str:  # noqa: C901 PLR0912 -- one line an action
        match action:
            case actions.Persist():
                return "persist " + " ".join(_row(row) for row in action.rows)
            case actions.Send():
                return f"{type(action.message).__name__} to {action.dst}"
            case actions.SetTimer():
                return f"timer {_name(action.timer)} {action.at_s - self.at_s:.6g}"
            case actions.ClearTimer():
                return f"clear {_name(action.timer)}"
            case actions.SendGossip():
                return f"{'+'.join(_said(message) for message in action.messages)} to {action.node}"
            case actions.Answer():
                return f"refuse {type(action.error).__name__}" if action.error is not None else "answer"
            case actions.TaskChanged():
                return f"changed {'running' if action.running and action.record.started_at else action.record.state}"
            case actions.MembersCancelled():
                return f"cancelled {len(action.row.members)}"
            case actions.SpawnTask():
                return f"spawn {action.attempt}"
            case actions.SignalTask():
                return f"signal {action.signal}"
            case actions.Decided():
                return f"decided {action.choice}"
            case actions.SendResult():
                return f"result to {action.dst}"
            case _:
                return type(action).__name__


def _name(timer: timers.Timer) -> str:
    return timer.kind.value if isinstance(timer, timers.GossipDue) else str(type(timer).__struct_config__.tag)


def _said(message: GossipMessage) -> str:
    if isinstance(message, MembershipUpdate):
        return f"{message.node}={message.standing.name.lower()}"
    return str(type(message).__struct_config__.tag)


def is_gossip(action: actions.Action) -> bool:
    """Whether it concerns who is there: what most tests are not about (tests/core/test_membership.py is)."""
    match action:
        case actions.SetTimer() | actions.ClearTimer():
            return isinstance(action.timer, timers.GossipDue)
        case actions.Send():
            return isinstance(action.message, messages.Sync | messages.ProfileRequest)
        case _:
            return isinstance(action, actions.SendGossip)


def _row(row: actions.Row) -> str:  # noqa: C901 PLR0912 -- one line a row
    match row:
        case actions.PutTask():
            return str(row.record.state)
        case actions.PutUsage():
            return f"usage {row.task or row.uid.hex()} {row.attempt} {row.node}"
        case actions.PutMembers():
            return f"{len(row.members)} {row.record.state}"
        case actions.PutExecution():
            return str(row.record.state)
        case actions.PutMaking():
            return "making"
        case actions.PutRun():
            return f"run {row.incarnation}"
        case actions.PutSubmission():
            return "submission"
        case actions.PutFloor():
            return f"floor={row.floor}"
        case actions.DropExecution():
            return "drop"
        case actions.PutEvent():
            return "event"
        case actions.PutChores():
            return "owes " + " ".join(row.chores)
        case actions.DropFloors():
            return f"drop {len(row.uids)} floors"
        case actions.PutFate():
            return f"fate {row.fate.task}"
        case actions.DropFates():
            return f"drop {len(row.tasks)} fates"
        case actions.PutGroup():
            return f"group {row.group.name}"
        case actions.DropGroup():
            return f"no group {row.name}"
        case actions.PutDrain():
            return "undrained" if row.reason is None else "drained"


def assert_durable_first(done: list[actions.Action]) -> None:
    """D1 … D6: what may only be said or done once it is durable never comes before its row (in the same event)."""
    for place, action in enumerate(done):
        if not isinstance(action, actions.Persist):
            continue
        before = done[:place]
        said = [act.message for act in before if isinstance(act, actions.Send)]
        for row in action.rows:
            match row:
                case actions.PutSubmission():
                    assert not any(isinstance(act, actions.Answer) for act in before), "D1"
                case actions.PutTask():
                    uid, attempt = row.record.uid, row.record.attempt
                    kinds = (messages.Commit, messages.ResultAck)
                    assert not any(isinstance(m, kinds) and (m.uid, m.attempt) == (uid, attempt) for m in said), "D2 D5"
                    assert not any(isinstance(a, actions.SpawnTask) and a.task == row.record.task for a in before), "D2"
                case actions.PutExecution():
                    spawned = [act for act in before if isinstance(act, actions.SpawnTask | actions.SendResult)]
                    assert not any(act.task == row.record.task for act in spawned), "D3 D4"
                case actions.PutFloor():
                    refusals = (messages.NotStarted, messages.Return)
                    assert not any(isinstance(m, refusals) and m.uid == row.uid for m in said), "D6"
                case actions.DropExecution():
                    assert not any(isinstance(m, messages.Died) and m.uid == row.uid for m in said)


def offer(attempt: int = 1, home: str = "h", *, only: bool = False, lease_s: float = 60.0, **changes: Any) -> Any:
    return messages.Offer(f"{home}/1", UID, attempt, spec(**changes), lease_s, only=only)


__all__ = ["ACCEPTS", "ALONE", "RECEIVER", "SENDER", "UID", "Given", "Placement", "ResourceRequest", "offer", "spec"]
