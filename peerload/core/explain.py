"""Explanations for people: why a task waits, why it went to its node, the smallest change with which it would start.

Every known node gets a verdict: whether it could ever run the task, whether it has room now, and why. For this node
it is the present decision of admission: the ledger, `placement.py` and the reservations are queried, not copied. For
other nodes it follows from their profile and their newest report. Where these are not enough, the verdict is unknown
(`EligibilityVerdict.now` None): reports do not include the devices that waiting tasks there need. `now` is False for a
node with room if the policies of this node send nothing there now. A device that another node keeps for a waiting task
counts as taken, even if a small task could start on it meanwhile.

Suggestions are single changes that are sure to help. Free ones come first (wait for any GPU, state the memory), then
asking for a little less, then allowing more nodes; a higher priority comes last.

Read-only: no report is made, nothing is counted or decided, so an explanation has no effect.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from peerload.core.membership.peers import NOT_MET, PeerState
from peerload.core.resources.admission import cpus_free_there, has_memory, lacks, under_cap_text, why_never
from peerload.core.resources.devices import EPSILON, DeviceRequest
from peerload.core.resources.placement import Scope, matches_device, place
from peerload.core.work import HomePhase
from peerload.model.config import GpuConfig
from peerload.model.resources import GPU, MIB, DeviceMode, GpuShare, GpuWait, Region
from peerload.model.task import PRIORITY_MAX
from peerload.model.text import times_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from peerload.core.membership.peers import PeerInfo
    from peerload.core.node import Node
    from peerload.core.resources.admission import Ledger
    from peerload.core.resources.devices import DeviceState
    from peerload.core.resources.placement import Backfill
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.core.work import HomeTask
    from peerload.model.resources import Device, DeviceLoad, LoadReport, Placement, Profile, ResourceRequest
    from peerload.model.task import TaskSpec

    Change = tuple[str, dict[str, object]]

LOOKED_AT_MAX = 1000
"""Tasks of this home at one other node that are checked."""
NAMED_MAX = 4
"""Tasks, or devices, that are named in one reason."""
COUNTED_MAX = 1000
"""Tasks before one in line that are counted."""
GIB = 1 << 30
UNNAMED = "a task that is ending"
Known = tuple[bool | None, str]
TRIED_MAX = 4
"""Smaller amounts of one resource that are tried, the largest first."""
FEWER_MAX = 8
"""Maximum number of GPUs fewer than requested that are tried."""
STEP = 10
"""Amounts are rounded down to tenths."""


class EligibilityVerdict(msgspec.Struct, frozen=True, gc=False):
    """Verdict on one node and one task. can_ever: the node could ever run it; now: the task would go there and be
    admitted now; None where this node cannot tell. age_s: age of the facts, None for this node's own."""

    node: str
    can_ever: bool | None
    now: bool | None
    reason: str
    age_s: float | None = None


class WaitReasons:
    """Reasons why one task of this home waits, here or at another node; ``now_s`` is the current boot time."""

    def __init__(self, node: Node, task: HomeTask, now_s: float) -> None:
        self._node = node
        self._task = task
        self._now_s = now_s
        there = (
            peer for peer in node.membership if peer.state is not PeerState.LEFT
        )  # a node that has left is no member
        self._peers = sorted(there, key=lambda peer: peer.identity.node)
        self._names = {work.key: work.task for work in node.runs.works()}

    def verdicts(self, spec: TaskSpec | None = None) -> Iterator[EligibilityVerdict]:
        """Verdict of every known node, this node first, the others by name. ``spec``: replaces the task's own spec."""
        spec = spec or self._task.spec
        yield self._here(spec.request, spec.placement, ignores_turn=False)
        for peer in self._peers:
            yield self._there(peer, spec)
        for node in self._node.membership.unmet(spec.placement, self._node.state.node):
            yield EligibilityVerdict(node, can_ever=None, now=None, reason=NOT_MET)

    def has_room(self, spec: TaskSpec) -> str:
        """The first node that has room for the task with this spec; "" if none is known to have."""
        here = self.has_room_here(spec)
        if here:
            return here
        home = self._node.state.node
        for peer, report in self._reachable:
            if not why_never(peer.profile, spec.request, spec.placement, home):
                now, _ = reported_room(peer.profile, report, spec.request)
                if now:
                    return peer.identity.node
        return ""

    def has_room_here(self, spec: TaskSpec, *, ignores_turn: bool = False) -> str:
        """This node's name, if it has room; ignores_turn: as if the task were first in line here."""
        here = self._here(spec.request, spec.placement, ignores_turn=ignores_turn)
        return here.node if here.now else ""

    @cached_property
    def _reachable(self) -> list[tuple[PeerInfo, LoadReport]]:
        """The peers, with their reports, to which the task could be moved now if they had room."""
        if not self._task.stranded_because and not self._node.sharing.would_leave(self._task):
            return []
        believed_s = self._node.state.config.report_age_s_max
        found = []
        for peer in self._peers:
            last = self._node.membership.last_report(peer.identity.node)
            is_fresh = last is not None and self._now_s - last.at_s <= believed_s
            if last is not None and is_fresh and peer.knows_profile and not self._not_now_there(peer):
                found.append((peer, last.report))
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
                state.node, can_ever=True, now=True, reason="room; a better node is searched for first"
            )
        return EligibilityVerdict(state.node, can_ever=True, now=True, reason="room")

    def _and_drained(self, never: list[str], drained: bool) -> str:
        return ", ".join([*never, "drained"] if drained else never)

    def _not_now_here(self, request: ResourceRequest, *, ignores_turn: bool) -> str:
        node, task, ledger = self._node, self._task, self._node.ledger
        profile = node.state.profile
        if profile.drained:
            return drained_reason(profile.drain_reason)
        if not node.runs.has_launcher:
            return "its launcher is not running"
        if node.shortage.reason:
            return f"no task can be started: {node.shortage.reason}"
        words = []
        if request.takes_devices:
            run_s = node.state.run_s_max(task, ledger.devices.models)
            learned = node.state.learned_gpu_bytes(task, ledger.devices.models)
            waited_s = ledger.now_s - task.arrived_s
            owner = ledger.devices.mps_owner(task.spec, "")
            ask = DeviceRequest(request, ledger.devices.config, learned, run_s, owner)
            kept = None if ignores_turn else ledger.kept
            words.append(devices_reason(ledger, request, ask, task.task, waited_s, kept, self._names))
        words.append(cores_reason(ledger, request, self._names))
        found = "; ".join(filter(None, words))
        return found if found or ignores_turn else turn_reason(node.queue, task)

    # -- the others ----------------------------------------------------------------------------------------------------

    def _there(self, peer: PeerInfo, spec: TaskSpec) -> EligibilityVerdict:
        node, home, task, request = peer.identity.node, self._node.state.node, self._task, spec.request
        last = self._node.membership.last_report(node)
        age_s = max(self._now_s - (last.at_s if last is not None else peer.heard_s), 0.0)
        if not peer.knows_profile:
            gone = self._gone(peer)
            known = gone or "its resources are not known here yet"
            return EligibilityVerdict(node, can_ever=None, now=False if gone else None, reason=known, age_s=age_s)
        never = self._node.membership.never_there(peer, spec, home)
        if never:
            all_lacking = lacks(peer.profile, request, spec.placement, home) or [never]
            reason = self._and_drained(all_lacking, peer.profile.drained)
            if peer.state is PeerState.DEAD:
                reason = f"{self._gone(peer)}; {reason}"
            return EligibilityVerdict(node, can_ever=False, now=None, reason=reason, age_s=age_s)
        because = self._not_now_there(peer)
        if because:
            return EligibilityVerdict(node, can_ever=True, now=False, reason=because, age_s=age_s)
        believed_s = self._node.state.config.report_age_s_max
        if last is None:
            return EligibilityVerdict(
                node, can_ever=True, now=None, reason="no load report of it was received yet", age_s=age_s
            )
        if age_s > believed_s:
            reason = f"its last load report is {duration_text(age_s)} old"
            return EligibilityVerdict(node, can_ever=True, now=None, reason=reason, age_s=age_s)
        now, reason = reported_room(peer.profile, last.report, request)
        if request.takes_devices and not now:
            reason += self._own_there(node)
        if now and (kept := self._node.sharing.stays_because(task)):
            now, reason = False, f"{reason}; {kept}"
        if now and task.phase is HomePhase.AWAY and task.record.node == node and request == task.spec.request:
            reason = f"it is to start there: {reason}"
        return EligibilityVerdict(node, can_ever=True, now=now, reason=reason, age_s=age_s)

    def _own_there(self, node: str) -> str:
        """Tasks of this home that hold devices there; the owners of other tasks are not reported."""
        tasks = islice(self._node.home.elsewhere.get(node, {}).values(), LOOKED_AT_MAX)
        holders = [f"{task.task} ({len(task.devices)})" for task in tasks if task.devices and task.running_at]
        return f"; of this home: {some_of(holders)}" if holders else ""

    def _gone(self, peer: PeerInfo) -> str:
        """The reason if the node is suspect, dead or asleep; "" otherwise."""
        since = duration_text(max(self._now_s - peer.since_s, 0.0))
        match peer.state:
            case PeerState.SUSPECT:
                return f"suspect: it has not answered for {since}"
            case PeerState.DEAD:
                return f"dead for {since}"
            case PeerState.ASLEEP if peer.identity.node in self._node.membership.waking.failed:
                return f"asleep for {since}, and did not wake when it was asked to"
            case PeerState.ASLEEP:
                return f"asleep for {since}; it is woken when no other node has room"
            case _:
                return ""

    def _not_now_there(self, peer: PeerInfo) -> str:
        """The reason why the task is not sent there now, regardless of its free resources."""
        node, task = self._node, self._task
        name = peer.identity.node
        gone = self._gone(peer)
        if gone:
            return gone
        if peer.profile.drained:
            return drained_reason(peer.profile.drain_reason)
        if peer.profile.trouble:
            return f"it accepts no tasks of other nodes: {peer.profile.trouble}"
        if skipped := node.membership.circuit_breaker.why(name):
            return skipped
        if declines := node.membership.why_declines(name, task.spec):
            return declines
        if task.phase is HomePhase.OFFERED and task.offered_to == name:
            return ""
        if not task.stranded_because and not node.home.may_migrate(task):
            limit = node.home.migrations_max(task)
            if not node.state.has_disk_room:
                return f"nothing is sent away: {node.state.node}'s disk is nearly full"
            return f"its migration limit is reached: moved {times_text(task.record.migrations)}, at most {limit}"
        return ""


_RUNNING = (HomePhase.HERE, HomePhase.AWAY)
_ELSEWHERE = (HomePhase.AWAY, HomePhase.COLLECTING, HomePhase.UNKNOWN)


def drained_reason(reason: str) -> str:
    return f'drained: "{reason}"' if reason else "drained"


def uncollected_reason(task: HomeTask) -> str:
    """The reason why the result of a task that has ended is not recorded yet; "" if there is none."""
    if task.output_waits_because and task.phase in _RUNNING:
        where = f" on {task.record.node}" if task.phase is HomePhase.AWAY else ""
        return f"it has ended{where}, and its output files wait in its working directory: {task.output_waits_because}"
    collection = task.collection
    if collection is None or task.record.attempt != collection.attempt or task.phase not in _ELSEWHERE:
        return ""
    if collection.done_bytes and collection.exit.staged is not None:
        done, size = collection.done_bytes / MIB, collection.exit.staged.out_bytes / MIB
        return f"it has ended on {collection.node}, its output files are on their way: {done:.0f} of {size:.0f} MiB"
    if not collection.failed_because:
        return ""
    return f"it has ended on {collection.node}, and its result waits there: {collection.failed_because}"


def holding_reason(task: HomeTask) -> str:
    """The reason why a waiting task is not considered at all; "" if it is considered."""
    match task.phase:
        case HomePhase.OFFERED:
            staging = task.offering.staging if task.offering is not None else None
            if staging is not None and staging.builds:
                return f"its environment is being built on {task.offered_to}"
            if staging is not None:
                done, size = staging.done_bytes / MIB, staging.size_bytes / MIB
                return f"its files are on their way to {task.offered_to}: {done:.1f} of {size:.1f} MiB"
            return f"it is offered to {task.offered_to}, which has not answered yet"
        case HomePhase.RESTING:
            if task.record.failures and not task.record.losses:
                return task.record.reason
            return f"an attempt of it was lost ({task.record.reason}); it is considered again shortly"
        case HomePhase.AWAY:
            return uncollected_reason(task) or task.record.reason
        case HomePhase.COLLECTING:
            node = task.collection.node if task.collection is not None else task.record.node
            return uncollected_reason(task) or f"it has ended on {node}; its output is on the way"
        case _:
            return ""


def duration_text(seconds: float) -> str:
    """``3 s``, ``4 min``, ``2.5 h``."""
    if seconds < 10:  # noqa: PLR2004 -- below 10 s, tenths matter
        return f"{seconds:.1f} s"
    if seconds < 120:  # noqa: PLR2004 -- the step from one unit to the next
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"  # noqa: PLR2004 -- as above


def some_of(names: Sequence[str]) -> str:
    """The first few names, and the number of the others."""
    more = len(names) - NAMED_MAX
    return ", ".join([*names[:NAMED_MAX], *([f"and {more} more"] if more > 0 else [])])


# -- cores and memory --------------------------------------------------------------------------------------------------


def cores_reason(ledger: Ledger, request: ResourceRequest, names: Mapping[str, str]) -> str:
    """The reason why its cores and memory are not free; "" if they are."""
    if ledger.has_cores(request):
        return ""
    profile = ledger.profile
    if profile.slots_fixed and len(ledger.running) >= profile.slots:
        holders = [names.get(key, UNNAMED) for key in ledger.running]
        return f"{len(ledger.running)} of {profile.slots} slot{'' if profile.slots == 1 else 's'} taken: {some_of(holders)}"
    if ledger.cpus_running + ledger.cores_of(request) > profile.cpus + EPSILON:
        taken = f"{ledger.cpus_running:g} of {profile.cpus:g} cpus taken, asked {request.cpus:g}"
        return taken + _by(names, {key: one.cpus for key, (one, _) in ledger.running.items()}, "g")
    if profile.power is not None and ledger.exceeds_cap(ledger.cpus_running + ledger.cores_of(request)):
        return f"{ledger.cpus_running:g} of {under_cap_text(profile.power, profile.cpus)} taken, asked {request.cpus:g}"
    promised = f"{ledger.mem_promised_bytes / GIB:.1f} of {profile.mem_bytes / GIB:.1f} GiB of memory promised"
    held = {key: one.mem_bytes / GIB for key, (one, _) in ledger.running.items() if one.mem_bytes}
    return f"{promised}, asked {request.mem_bytes / GIB:.1f}" + _by(names, held, ".1f")


def _by(names: Mapping[str, str], held: Mapping[str, float], form: str) -> str:
    most = sorted(held, key=lambda key: (-held[key], key))
    holders = [f"{names.get(key, UNNAMED)} ({held[key]:{form}})" for key in most]
    return f": {some_of(holders)}" if holders else ""


# -- devices -----------------------------------------------------------------------------------------------------------


def devices_reason(
    ledger: Ledger,
    request: ResourceRequest,
    ask: DeviceRequest,
    task: str,
    waited_s: float,
    kept: Backfill | None,
    names: Mapping[str, str],
) -> str:
    """The reason why its devices are not free; "" if they are. ``kept``: reservations at the last check."""

    def allows(state: DeviceState, asked: DeviceRequest) -> bool:
        return kept is None or kept.allows(state, asked, task)

    if place(ledger.devices, request, ask, ledger.now_s, waited_s, allows) is not None:
        return ""
    why = partial(_why_not, ledger, ask, task, kept)
    for kind, count in request.devices:
        states = ledger.devices.of_kind(kind)
        busy = {state: words for state in states if (words := why(state))}
        if len(states) - len(busy) < count:
            return f"{len(busy)} of {len(states)} {kind} busy, asked {count}{_holders(busy, names)}"
    return _gpus_reason(request, ask, Scope(ledger.devices, request, waited_s), why, names)


def _gpus_reason(
    request: ResourceRequest,
    ask: DeviceRequest,
    scope: Scope,
    why: partial[str],
    names: Mapping[str, str],
) -> str:
    states = scope.all
    busy = {state: words for state in states if (words := why(state))}
    meant = some_of([f"GPU {state.device.index}" for state in states])
    prefix = f"it waits for exactly {meant}: " if scope.is_narrow else ""
    of_all = f"{len(busy)} of {_gpus(len(states))}"
    asked = f", asked {request.gpus}" if request.gpus > 1 else ""
    if ask.wants_empty and all(state.grants for state in busy):
        return f"{prefix}{of_all} busy{asked}{_holders(busy, names)}"
    each = [f"GPU {state.device.index}: {words}{_holders({state: words}, names, '')}" for state, words in busy.items()]
    if scope.is_narrow and len(states) == 1:
        return f"{prefix}{each[0].partition(': ')[2]}"
    return f"{prefix}{of_all} without room{asked}: {'; '.join(each[:NAMED_MAX])}" + (
        f"; and {len(each) - NAMED_MAX} more" if len(each) > NAMED_MAX else ""
    )


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _why_not(ledger: Ledger, ask: DeviceRequest, task: str, kept: Backfill | None, state: DeviceState) -> str:
    """The reason why this device is not free; "" if it is."""
    words = state.why_not(ask, ledger.now_s)
    if words or kept is None or kept.allows(state, ask, task):
        return words
    other = kept.kept(state.id, task)
    if other is None:
        return ""
    if other.is_hard:
        return f"kept for {other.task}, which has waited so long that no task may overtake it"
    left_s = other.starts_s - ledger.now_s
    until = "" if math.isinf(left_s) else f" and is to start in about {duration_text(left_s)}"
    return f"kept for {other.task}, which waits longer{until}"


def _holders(busy: Mapping[DeviceState, str], names: Mapping[str, str], before: str = ": ") -> str:
    """Tasks that hold these devices, with the number each holds, and the number of devices that foreign programs
    occupy."""
    counts = Counter(names.get(key, UNNAMED) for state in busy for key in state.grants)
    found = [f"{name} ({count})" if len(busy) > 1 else name for name, count in counts.most_common()]
    foreign = sum(bool(state.foreign) and state.device.kind == GPU for state in busy)
    if foreign and len(busy) > 1:
        found.append(f"other programs ({foreign})")
    if not found:
        return ""
    return f"{before}{some_of(found)}" if before else f" ({some_of(found)})"


# -- whose turn it is --------------------------------------------------------------------------------------------------


def turn_reason(queue: WaitingQueue, task: HomeTask) -> str:
    """The reason that another task has to start before it, though there is room for it; "" if there is none."""
    first = queue.goes_before(task)
    if first is None:
        return ""
    if first.spec.priority > task.spec.priority:
        return f"there is room, and {first.task} (priority {first.spec.priority}) goes first"
    before = queue.count_before(task, COUNTED_MAX)
    if first.spec.request.takes_devices and not task.spec.request.takes_devices:
        return f"the next cores are kept for {first.task}, which has its devices and came before it"
    if task.spec.request.takes_devices:
        return f"its devices are free; the next cores are for {first.task}, which waits longer"
    many = f"{COUNTED_MAX} or more" if before >= COUNTED_MAX else str(max(before, 1))
    return f"{many} {'waits' if many == '1' else 'wait'} before it, {first.task} first"


# -- room on other nodes -------------------------------------------------------------------------------------------------


def reported_room(profile: Profile, report: LoadReport, request: ResourceRequest) -> Known:
    """Room of another node for a task: whether it has some now (None: not known), and the reason."""
    if report.region is Region.UNDERLOADED and not report.accepts:
        return False, "it accepts no tasks of other nodes now"
    cores, cores_text = _cores_there(profile, report, request)
    if not request.takes_devices:
        return cores, cores_text
    devices, words = _devices_there(profile, report, request)
    if devices is False or cores is not False:
        return (None if devices and cores is None else devices), words
    return False, f"{words}; {cores_text}"


# -- cores and memory --------------------------------------------------------------------------------------------------


def _cores_there(profile: Profile, report: LoadReport, request: ResourceRequest) -> Known:
    n, slots = report.load_tasks, max(profile.slots, 1)
    stands = f"{max(n - report.waiting, 0)} of {slots} slot{'' if slots == 1 else 's'} taken"
    if report.slots_foreign:
        stands += f" ({report.slots_foreign} by other programs)"
    if report.waiting:
        stands += f", {report.waiting} wait"
    if request.takes_devices:
        return _cores_beside_devices(profile, report, request, stands)
    if n >= slots:
        return False, f"full: {stands}" + ("; it would let more wait there" if report.accepts else "")
    if not report.accepts:
        return False, f"it takes no more of others: {stands}"
    if scarce := _memory_there(profile, report, request):
        return False, scarce
    least, most = cpus_free_there(profile, report)
    if request.cpus <= least + EPSILON:
        return True, f"room: {stands}"
    if request.cpus > most + EPSILON:
        return False, f"about {most:g} of {profile.cpus:g} cpus free, asked {request.cpus:g}"
    return None, f"{least:g} to {most:g} of {profile.cpus:g} cpus free, asked {request.cpus:g}"


def _memory_there(profile: Profile, report: LoadReport, request: ResourceRequest) -> str:
    """The reason why its memory is not free, given the requests of all tasks there; "" if it is."""
    if has_memory(request, profile, report.mem_requested_bytes):
        return ""
    requested = f"{report.mem_requested_bytes / GIB:.1f} of {profile.mem_bytes / GIB:.1f} GiB of memory requested"
    return f"{requested}, asked {request.mem_bytes / GIB:.1f}"


def _cores_beside_devices(profile: Profile, report: LoadReport, request: ResourceRequest, stands: str) -> Known:
    """Explain the cores for a task that takes devices. It does not wait behind tasks that wait for cores; only
    running tasks count."""
    if profile.slots_fixed and report.running >= profile.slots:
        return False, f"full: {stands}"
    if scarce := _memory_there(profile, report, request):
        return (None if report.waiting else False), scarce
    least, _ = cpus_free_there(profile, report)
    is_sure = report.load_tasks < profile.slots and request.cpus <= least + EPSILON and not report.waiting
    return (True if is_sure else None), stands


# -- devices -----------------------------------------------------------------------------------------------------------


def _devices_there(profile: Profile, report: LoadReport, request: ResourceRequest) -> Known:
    loads = {load.mark: load for load in report.devices}
    is_sure = not report.waiting and report.gpu_tasks <= sum(load.tasks for load in report.devices)
    for kind, count in request.devices:
        told = [loads.get(device.mark) for device in profile.devices if device.kind == kind]
        free = sum(load is not None and load.is_free for load in told)
        if free < count:
            return False, f"{len(told) - free} of {len(told)} {kind} busy, asked {count}"
    if not request.gpus:
        return (True if is_sure else None), _with_waiting(
            report, f"room: {', '.join(kind for kind, _ in request.devices)}"
        )
    gpus = [device for device in profile.devices if device.kind == GPU]
    if not gpus:
        is_free = report.gpus_free >= request.gpus
        return is_free and (is_sure or None), _with_waiting(report, f"{report.gpus_free} of {profile.gpus} GPUs free")
    if request.gpu_prefer and request.gpu_wait is GpuWait.QUEUE:
        gpus = [gpu for gpu in gpus if any(matches_device(gpu, name) for name in request.gpu_prefer)]
    ask = DeviceRequest(request, GpuConfig())
    rooms = [_has_room_there(gpu, loads.get(gpu.mark), ask) for gpu in gpus]
    words = _gpus_there(gpus, loads, request, ask, rooms)
    sure, possible = rooms.count(True), len(rooms) - rooms.count(False)
    if possible < request.gpus:
        return False, words
    if sure < request.gpus:
        return None, f"{words}; whether they have room left is not reported"
    return (True if is_sure else None), _with_waiting(report, words)


def _with_waiting(report: LoadReport, words: str) -> str:
    return f"{words}; {report.waiting} wait there already" if report.waiting else words


def _has_room_there(gpu: Device, load: DeviceLoad | None, ask: DeviceRequest) -> bool | None:
    """True if this GPU has room for the task; None if the report does not tell."""
    if load is None:
        return None
    if not load.health.is_usable or load.mode is DeviceMode.EXCLUSIVE:
        return False
    if load.is_free or ask.wants_empty:
        return load.is_free
    need = ask.bytes_of(gpu)
    if gpu.mem_bytes and load.free_mib * MIB < (need or 1):
        return False
    if ask.fraction < 1.0:
        percent = math.ceil(ask.fraction * 100)
        could = ask.need_bytes is not None or load.free_percent + 1 >= percent  # free_percent is rounded down
        return True if load.free_percent >= percent else None if could else False
    if not load.free_slots:
        return False
    return True if gpu.mem_bytes else None


def _gpus_there(
    gpus: list[Device],
    loads: dict[int, DeviceLoad],
    request: ResourceRequest,
    ask: DeviceRequest,
    rooms: list[bool | None],
) -> str:
    busy = rooms.count(False)
    told = [load for gpu in gpus if (load := loads.get(gpu.mark)) is not None]
    words = f"{busy} of {len(gpus)} GPU{'' if len(gpus) == 1 else 's'} {'busy' if ask.wants_empty else 'without room'}"
    if not busy:
        return f"room: {len(gpus) - busy} of {len(gpus)} GPU{'' if len(gpus) == 1 else 's'}"
    if request.gpus > 1:
        words += f", asked {request.gpus}"
    sick = sum(not load.health.is_usable for load in told)
    if sick:
        words += f", {sick} of them sick or not answering"
    most = max((load.free_mib for load in told), default=0)
    if request.gpu_mem_bytes and not ask.wants_empty:
        words += f" (at most {most * MIB / GIB:.1f} GiB free, asked {request.gpu_mem_bytes / GIB:.1f})"
    etas = [load.eta_s for load in told if load.eta_s]
    return f"{words}; one is free in about {duration_text(min(etas))}" if etas else words


# -- the smallest change -------------------------------------------------------------------------------------------------


class Suggestion(msgspec.Struct, frozen=True, gc=False):
    """A change, as it is typed, and the node where the task would start then."""

    words: str
    node: str


def smallest_change(node: Node, reasons: WaitReasons, spec: TaskSpec) -> Suggestion | None:
    """The first change that is sure to help; None if no single change is."""
    for same in (*_other_gpus(node, spec.request), *_less(node, spec.request)):
        asking = [
            (words, msgspec.structs.replace(spec, request=msgspec.structs.replace(spec.request, **changes)))
            for words, changes in same
        ]
        if len(asking) > 1 and not reasons.has_room(asking[-1][1]):
            continue  # if the largest reduction does not help, a smaller one does not
        for words, changed in asking:
            if name := reasons.has_room(changed):
                return Suggestion(words, name)
    for words, changes in _elsewhere(spec.placement):
        changed = msgspec.structs.replace(spec, placement=msgspec.structs.replace(spec.placement, **changes))
        if name := reasons.has_room(changed):
            return Suggestion(words, name)
    highest = max((work.spec.priority for work in islice(node.queue.oldest_first(), 1)), default=spec.priority)
    name = reasons.has_room_here(spec, ignores_turn=True) if highest < PRIORITY_MAX else ""
    return Suggestion(f"with --prio {highest + 1}", name) if name else None


def _other_gpus(node: Node, request: ResourceRequest) -> Iterator[list[Change]]:
    """Other GPUs, or less of them; by kind of change, the smallest reduction first."""
    if not request.gpus:
        return
    if request.gpu_wait is GpuWait.QUEUE and request.gpu_prefer:
        yield [("with --gpu-wait schedule", {"gpu_wait": GpuWait.SCHEDULE})]
    doubt = ", if that is enough for it," if DeviceRequest(request, node.ledger.devices.config).wants_empty else ""
    yield [
        (f"with --gpu-mem {mem_bytes / GIB:g}G{doubt}", {"gpu_mem_bytes": mem_bytes})
        for mem_bytes in _gpu_memory(node, request)
    ]
    fewer = range(request.gpus - 1, max(request.gpus - 1 - FEWER_MAX, 0), -1)
    yield [(f"with -G{gpus}", {"gpus": gpus}) for gpus in fewer]


def _less(node: Node, request: ResourceRequest) -> Iterator[list[Change]]:
    """Fewer cores, less memory."""
    yield [(f"with -c {cpus:g}", {"cpus": cpus}) for cpus in _fewer_cores(node, request.cpus)]
    memory = _less_memory(node, request.mem_bytes)
    yield [(f"with --mem {mem_bytes / GIB:g}G", {"mem_bytes": mem_bytes}) for mem_bytes in memory]


def _elsewhere(placement: Placement) -> Iterator[Change]:
    """Changes that allow more nodes."""
    if placement.local:
        yield "without --local", {"local": False}
    if placement.node:
        yield f"without -w {placement.node}", {"node": None}
    for name in placement.exclude[:FEWER_MAX]:
        yield f"without -x {name}", {"exclude": tuple(other for other in placement.exclude if other != name)}
    for label in placement.labels[:FEWER_MAX]:
        yield f"without -C {label}", {"labels": tuple(other for other in placement.labels if other != label)}


def _largest(amounts: Iterable[float], below: float) -> list[float]:
    """The largest distinct amounts below this, rounded down to tenths."""
    rounded = {math.floor(amount * STEP) / STEP for amount in amounts}
    return sorted((amount for amount in rounded if 0 < amount < below), reverse=True)[:TRIED_MAX]


def _gpu_memory(node: Node, request: ResourceRequest) -> list[int]:
    """Smaller amounts of memory of each GPU to try; any amount if the request names none."""
    ledger = node.ledger
    if request.gpu_fraction < 1.0 or request.gpu_share is GpuShare.EXCLUSIVE:
        return []
    free = [state.free_bytes(ledger.now_s) for state in ledger.devices.of_kind(GPU) if state.reading.health.is_usable]
    for peer in node.membership:
        last = node.membership.last_report(peer.identity.node)
        marks = {device.mark for device in peer.profile.devices if device.kind == GPU}
        if last is not None and marks:
            free += [load.free_mib * MIB for load in last.report.devices if load.mark in marks]
    asked = request.gpu_mem_bytes / GIB or math.inf
    return [int(amount * GIB) for amount in _largest((size / GIB for size in free), asked)]


def _fewer_cores(node: Node, asked: float) -> list[float]:
    """Fewer cores than it asks for."""
    free = [node.ledger.profile.cpus - node.ledger.cpus_running]
    for peer in node.membership:
        last = node.membership.last_report(peer.identity.node)
        if last is not None:
            profile, n = peer.profile, last.report.load_tasks
            free.append(profile.cpus - n * profile.cpus / max(profile.slots, 1))
    return _largest(free, asked)


def _less_memory(node: Node, asked: int) -> list[int]:
    """Smaller amounts of memory to try."""
    free = [node.ledger.profile.mem_bytes - node.ledger.mem_promised_bytes]
    for peer in node.membership:
        last = node.membership.last_report(peer.identity.node)
        if last is not None:
            free.append(peer.profile.mem_bytes - last.report.mem_requested_bytes)
    return [int(amount * GIB) for amount in _largest((size / GIB for size in free), asked / GIB)]
