"""Why a waiting task does not start: for every node known whether it could ever run it, whether it has room now, and why.

Of this node that is what admission says at this moment; of the others what follows from their profile and their newest
report, and where these do not tell, that is said (`EligibilityVerdict.now` None). A look only: no report is made, nothing is counted
or decided, so that asking changes nothing. `suggestion.py` asks the same for a task that asked for a little less.
"""

from __future__ import annotations

from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from peerload.core.explain.reasons_here import cores_words, devices_words, duration_words, named, turn_words
from peerload.core.explain.reasons_there import room_told
from peerload.core.membership.membership import PeerState
from peerload.core.resources.admission import lacks, why_never
from peerload.core.resources.devices import DeviceRequest
from peerload.core.tasks.work import HomePhase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peerload.core.membership.membership import PeerInfo
    from peerload.core.node import Node
    from peerload.core.tasks.work import HomeTask
    from peerload.model.load import LoadReport
    from peerload.model.resources import Placement, ResourceRequest
    from peerload.model.task import TaskSpec


LOOKED_AT_MAX = 1000
"""Tasks of this home at one other node that are looked at."""


class EligibilityVerdict(msgspec.Struct, frozen=True, gc=False):
    """What can be said of one node and one task. can_ever: whether it could ever run it; now: whether it would be admitted
    there now; either None where nobody here can tell. age_s: how old the facts are, None for this node's own."""

    node: str
    can_ever: bool | None
    now: bool | None
    reason: str
    age_s: float | None = None


class WaitReasons:
    """About one task of this home that waits, here or in the queue of another node; ``now_s`` is this moment (boot
    time)."""

    def __init__(self, node: Node, task: HomeTask, now_s: float) -> None:
        self._node = node
        self._task = task
        self._now_s = now_s
        there = (
            peer for peer in node.membership if peer.state is not PeerState.LEFT
        )  # who has left is no node any more
        self._peers = sorted(there, key=lambda peer: peer.identity.node)
        self._names = {work.key: work.task for work in node.runs.works()}

    def verdicts(self, spec: TaskSpec | None = None) -> Iterator[EligibilityVerdict]:
        """Of every node known, this one first, the others by name. ``spec``: as if the task had asked for this."""
        spec = spec or self._task.spec
        yield self._here(spec.request, spec.placement, ignores_turn=False)
        for peer in self._peers:
            yield self._there(peer, spec.request, spec.placement)

    def has_room(self, spec: TaskSpec) -> str:
        """The first node that has room for the task as if it had asked for this; "" if none is known to have."""
        here = self.has_room_here(spec)
        if here:
            return here
        home = self._node.state.node
        for peer, report in self._reachable:
            if not why_never(peer.profile, spec.request, spec.placement, home):
                now, _ = room_told(peer.profile, report, spec.request)
                if now:
                    return peer.identity.node
        return ""

    def has_room_here(self, spec: TaskSpec, *, ignores_turn: bool = False) -> str:
        """This node, if it has room; ``ignores_turn``: as if the task came before all others here."""
        here = self._here(spec.request, spec.placement, ignores_turn=ignores_turn)
        return here.node if here.now else ""

    @cached_property
    def _reachable(self) -> list[tuple[PeerInfo, LoadReport]]:
        """The peers to which the task could be given now, if they had room, with what they told."""
        believed_s = self._node.state.config.report_age_s_max
        found = []
        for peer in self._peers:
            heard = self._node.membership.last_report(peer.identity.node)
            is_fresh = heard is not None and self._now_s - heard.at_s <= believed_s
            if heard is not None and is_fresh and peer.knows_profile and not self._not_now_there(peer):
                found.append((peer, heard.report))
        return found

    # -- this node -----------------------------------------------------------------------------------------------------

    def _here(self, request: ResourceRequest, placement: Placement, *, ignores_turn: bool) -> EligibilityVerdict:
        state = self._node.state
        never = lacks(state.profile, request, placement, state.node)
        if self._task.cannot_here:
            never.append(self._task.cannot_here)
        if never:
            return EligibilityVerdict(
                state.node, can_ever=False, now=None, reason=self._and_drained(never, state.profile.drained)
            )
        because = self._not_now_here(request, ignores_turn=ignores_turn)
        if because:
            return EligibilityVerdict(state.node, can_ever=True, now=False, reason=because)
        if self._task.withheld:
            return EligibilityVerdict(
                state.node, can_ever=True, now=True, reason="room; a better place is looked for first"
            )
        return EligibilityVerdict(state.node, can_ever=True, now=True, reason="room")

    def _and_drained(self, never: list[str], drained: bool) -> str:
        return ", ".join([*never, "drained"] if drained else never)

    def _not_now_here(self, request: ResourceRequest, *, ignores_turn: bool) -> str:
        node, task, ledger = self._node, self._task, self._node.ledger
        profile = node.state.profile
        if profile.drained:
            return drained_words(profile.drain_reason)
        if not node.runs.has_launcher:
            return "its launcher is away"
        if node.shortage.words:
            return f"no task can be started: {node.shortage.words}"
        words = []
        if request.takes_devices:
            run_s = node.state.run_s_max(task, ledger.devices.models)
            learned = node.state.learned_gpu_bytes(task, ledger.devices.models)
            waited_s = ledger.now_s - task.arrived_s
            ask = DeviceRequest(request, ledger.devices.config, learned, run_s)
            kept = None if ignores_turn else ledger.kept
            words.append(devices_words(ledger, request, ask, task.task, waited_s, kept, self._names))
        words.append(cores_words(ledger, request, self._names))
        found = "; ".join(filter(None, words))
        return found if found or ignores_turn else turn_words(node.queue, task)

    # -- the others ----------------------------------------------------------------------------------------------------

    def _there(self, peer: PeerInfo, request: ResourceRequest, placement: Placement) -> EligibilityVerdict:
        node, home, task = peer.identity.node, self._node.state.node, self._task
        heard = self._node.membership.last_report(node)
        age_s = max(self._now_s - (heard.at_s if heard is not None else peer.heard_s), 0.0)
        if not peer.knows_profile:
            gone = self._gone(peer)
            known = gone or "what it has is not known here yet"
            return EligibilityVerdict(node, can_ever=None, now=False if gone else None, reason=known, age_s=age_s)
        never = why_never(peer.profile, request, placement, home)
        if never:
            all_lacking = lacks(peer.profile, request, placement, home)
            reason = self._and_drained(all_lacking, peer.profile.drained)
            if peer.state is PeerState.DEAD:
                reason = f"{self._gone(peer)}; {reason}"
            return EligibilityVerdict(node, can_ever=False, now=None, reason=reason, age_s=age_s)
        because = self._not_now_there(peer)
        if because:
            return EligibilityVerdict(node, can_ever=True, now=False, reason=because, age_s=age_s)
        believed_s = self._node.state.config.report_age_s_max
        if heard is None:
            return EligibilityVerdict(
                node, can_ever=True, now=None, reason="nothing was heard of its load so far", age_s=age_s
            )
        if age_s > believed_s:
            reason = f"its last word on its load is {duration_words(age_s)} old"
            return EligibilityVerdict(node, can_ever=True, now=None, reason=reason, age_s=age_s)
        now, reason = room_told(peer.profile, heard.report, request)
        if request.takes_devices and not now:
            reason += self._own_there(node)
        if task.phase is HomePhase.AWAY and task.record.node == node and request == task.spec.request:
            reason = f"{'it is to start' if now else 'it waits'} there: {reason}"
        return EligibilityVerdict(node, can_ever=True, now=now, reason=reason, age_s=age_s)

    def _own_there(self, node: str) -> str:
        """Which tasks of this home have devices there; whose the others are is not told."""
        tasks = islice(self._node.home.elsewhere.get(node, {}).values(), LOOKED_AT_MAX)
        holders = [f"{task.task} ({len(task.devices)})" for task in tasks if task.devices and task.running_at]
        return f"; of this home: {named(holders)}" if holders else ""

    def _gone(self, peer: PeerInfo) -> str:
        """That nobody is there to be asked."""
        since = duration_words(max(self._now_s - peer.since_s, 0.0))
        match peer.state:
            case PeerState.SUSPECT:
                return f"suspect: it has not answered for {since}"
            case PeerState.DEAD:
                return f"dead for {since}"
            case _:
                return ""

    def _not_now_there(self, peer: PeerInfo) -> str:
        """Why nothing is sent there now, whatever room it has."""
        node, task = self._node, self._task
        name = peer.identity.node
        gone = self._gone(peer)
        if gone:
            return gone
        if peer.profile.drained:
            return drained_words(peer.profile.drain_reason)
        if peer.profile.trouble:
            return f"it takes no tasks of others: {peer.profile.trouble}"
        if skipped := node.membership.circuit_breaker.why(name):
            return skipped
        if declines := node.membership.why_declines(name, task.spec):
            return declines
        if task.phase is HomePhase.OFFERED and task.offered_to == name:
            return ""
        if not task.stranded_because and not node.home.may_migrate(task):
            limit = node.home.migrations_max(task)
            if not node.state.has_disk_room:
                return f"nothing is sent away: little room is left on {node.state.node}'s disk"
            return f"it may move no more: moved {task.record.migrations} times, at most {limit}"
        return ""


_ELSEWHERE = (HomePhase.AWAY, HomePhase.COLLECTING, HomePhase.UNKNOWN)


def drained_words(reason: str) -> str:
    """That a node takes no tasks for now, and why."""
    return f'drained: "{reason}"' if reason else "drained"


def uncollected_words(task: HomeTask) -> str:
    """That it has ended elsewhere, and why that cannot be recorded yet; "" if nothing is known of that."""
    collection = task.collection
    if collection is None or task.record.attempt != collection.attempt or task.phase not in _ELSEWHERE:
        return ""
    if not collection.failed_because:
        return ""
    return f"it has ended on {collection.node}, and its result waits there: {collection.failed_because}"


def holds_words(task: HomeTask) -> str:
    """What keeps a waiting task itself from being considered; "" if nothing does."""
    match task.phase:
        case HomePhase.OFFERED:
            return f"it is offered to {task.offered_to}, which has not answered yet"
        case HomePhase.RESTING:
            if task.record.failures and not task.record.losses:
                return task.record.reason
            return f"an attempt of it was lost ({task.record.reason}); it is considered again shortly"
        case HomePhase.AWAY:
            waits = f"it waits in the queue of {task.record.node}, which has taken it: {task.record.reason}"
            return uncollected_words(task) or waits
        case HomePhase.COLLECTING:
            node = task.collection.node if task.collection is not None else task.record.node
            return uncollected_words(task) or f"it has ended on {node}; its output is on the way"
        case _:
            return ""
