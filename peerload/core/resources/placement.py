"""Placement on the devices of this node: the devices that a task gets (all that it asks for, or none), and the devices
reserved for waiting tasks (`Backfill`). Pure.

Preferred devices come first, then the best of the others. `queue` waits for exactly the preferred GPUs; `schedule`
takes any that fit. Their order: an empty one for a task that may keep it busy, one that is not crowded, the one with
the least memory left over, for several GPUs those nearest to each other, the cooler, the lower number.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from itertools import combinations
from typing import TYPE_CHECKING

import msgspec

from peerload.core.resources.devices import ACTIVITY_HALF, CROWDED, NEVER_S, DeviceRequest
from peerload.model.resources import GPU, GpuWait, Nearness

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from peerload.core.resources.devices import DeviceLedger, DeviceState
    from peerload.model.resources import Device, ResourceRequest


COMBINATIONS_MAX = 2000
"""Sets of GPUs whose distances are compared; with more sets, GPUs are collected around each GPU in turn."""


def waits_for_preferred(request: ResourceRequest, waited_s: float) -> bool:
    """True if a task still waits for its preferred GPUs and takes no others."""
    is_over = 0 < request.gpu_wait_s_max <= waited_s
    return request.gpu_wait is GpuWait.QUEUE and bool(request.gpu_prefer) and not is_over


class Scope:
    """GPUs of this node that a task may get now. preferred: its wishes, the best first; others: the alternatives if
    these have no room; is_narrow: it waits for the preferred ones alone."""

    __slots__ = ("is_narrow", "others", "preferred")

    def __init__(self, ledger: DeviceLedger, request: ResourceRequest, waited_s: float) -> None:
        states = ledger.of_kind(GPU)
        self.preferred = preferred(states, request.gpu_prefer)
        self.is_narrow = waits_for_preferred(request, waited_s)
        self.others = [] if self.is_narrow else [state for state in states if state not in self.preferred]

    @property
    def all(self) -> list[DeviceState]:
        """Preferred and other devices together."""
        return [*self.preferred, *self.others]


def place(
    ledger: DeviceLedger,
    request: ResourceRequest,
    ask: DeviceRequest,
    now_s: float,
    waited_s: float = 0.0,
    allows: Callable[[DeviceState, DeviceRequest], bool] = lambda _state, _ask: True,
    without: Sequence[str] = (),
) -> tuple[str, ...] | None:
    """The ids of the devices for a task, None if there are not enough. ``allows``: whether a device that fits may be
    taken, given the reservations; ``without``: as if these attempts had ended."""

    def fits(state: DeviceState) -> bool:
        return allows(state, ask) and not state.why_not(ask, now_s, without)  # the cheaper test first

    names: list[str] = []
    for kind, count in request.devices:
        fitting = [state for state in ledger.of_kind(kind) if fits(state)]
        if len(fitting) < count:
            return None
        names += [state.id for state in fitting[:count]]
    if not request.gpus:
        return tuple(names)
    gpus = _gpus(Scope(ledger, request, waited_s), request.gpus, fits, _rank(ask, now_s))
    return None if gpus is None else (*gpus, *names)


def _gpus(
    scope: Scope, count: int, fits: Callable[[DeviceState], bool], rank: Callable[[DeviceState], tuple[float, ...]]
) -> tuple[str, ...] | None:
    wanted = [state for state in scope.preferred if fits(state)]
    if len(wanted) >= count:
        return tuple(state.id for state in wanted[:count])
    if scope.is_narrow:
        return None
    others = [state for state in scope.others if fits(state)]
    if len(wanted) + len(others) < count:
        return None
    ranked = sorted(others, key=rank)
    return tuple(state.id for state in [*wanted, *nearest(wanted, ranked, count - len(wanted))])


def _rank(ask: DeviceRequest, now_s: float) -> Callable[[DeviceState], tuple[float, ...]]:
    """Sort key of devices: the smallest is the best."""

    def key(state: DeviceState) -> tuple[float, ...]:
        is_shared = bool(state.grants or state.foreign)
        need_bytes = None if ask.fraction < 1.0 and ask.need_bytes is None else ask.bytes_of(state.device)
        prefers_empty = need_bytes is None or ask.activity > ACTIVITY_HALF
        left = state.free_bytes(now_s) - (ask.bytes_of(state.device) or 0)
        crowding = max(state.activity + ask.activity - CROWDED, 0.0)
        return is_shared and prefers_empty, crowding, left, state.reading.temperature_c, state.device.index

    return key


def nearest(chosen: Sequence[DeviceState], ranked: Sequence[DeviceState], count: int) -> tuple[DeviceState, ...]:
    """``count`` of the ranked devices, with the least maximum distance among them and the chosen; of equals the
    first."""
    if count == 1 and not chosen:
        return (ranked[0],)
    sets = list(_limited(ranked, count))

    def width(some: Sequence[DeviceState]) -> tuple[int, int]:
        ways = [distance(one, other) for one, other in combinations([*chosen, *some], 2)]
        return max(ways, default=0), sum(ways)

    return min(sets, key=width)


def _limited(ranked: Sequence[DeviceState], count: int) -> Sequence[tuple[DeviceState, ...]]:
    """The sets to compare, the better-ranked first."""
    total = 1
    for step in range(count):
        total = total * (len(ranked) - step) // (step + 1)
    if total <= COMBINATIONS_MAX:
        return list(combinations(ranked, count))
    gathered = []
    for first in ranked:
        near = sorted((state for state in ranked if state is not first), key=lambda other: distance(first, other))
        gathered.append((first, *near[: count - 1]))
    return gathered


def distance(one: DeviceState, other: DeviceState) -> int:
    """Distance of two devices (`Nearness`); unknown counts as far."""
    return dict(one.device.links).get(other.id, Nearness.SYSTEM)


def preferred(states: Sequence[DeviceState], names: Sequence[str]) -> list[DeviceState]:
    """The devices that these names select, in this order, each once."""
    found: list[DeviceState] = []
    for name in names:
        found += [state for state in states if state not in found and matches_device(state.device, name)]
    return found


def matches_device(device: Device, name: str) -> bool:
    """True if a user's selector of GPUs (a number, the beginning of a name, a pattern of models) matches this
    device."""
    if name.isdecimal():
        return device.index == int(name)
    if device.name.lower().startswith(name.lower()):
        return True
    return fnmatchcase(device.model.lower(), name.lower()) or fnmatchcase(device.model.lower(), f"* {name.lower()}")


STARVES_AFTER_RUNS = 3
RESERVED_MAX = 4
"""Limit on soft reservations: the first alone prevents starvation. The limit on hard reservations is the number of
devices, because more tasks could not start."""


class Reservation(msgspec.Struct, frozen=True, eq=False):
    """Devices (ids) reserved for the task with this request from ``starts_s`` on. number: count of earlier ones."""

    ask: DeviceRequest
    devices: tuple[str, ...]
    starts_s: float
    number: int
    task: str
    is_hard: bool


class Backfill:
    """Reservations for tasks that wait for devices, so that none starves: EASY backfilling, per device. They apply to
    one moment, and are made in the order in which tasks wait.

    The first task in line that does not fit *reserves* the devices that will have room for it first, at the time S at
    which enough of their tasks have almost surely ended (p90; infinite if unknown). A later task may start in spite of
    a reservation if it does not use its devices, or ends before S, or takes only what is left over at S. After
    ``starve_after_s`` (or three times the task's own duration, if known and longer) the reservation *hardens*: no new
    task starts on its devices, so that from then on the wait is at most the longest task that runs there. A task that
    waits for certain GPUs reserves only those. A device is reserved for the first task that waits for it, until the
    first hard reservation replaces that.

    number: count of the reservations so far; seen: that count when each task was tried.
    """

    __slots__ = ("_by_device", "_hard", "_ledger", "_replaced", "_soft", "now_s", "number", "seen")

    def __init__(self, ledger: DeviceLedger, now_s: float) -> None:
        self._ledger = ledger
        self.now_s = now_s
        self.number = 0
        self.seen: dict[str, int] = {}
        self._by_device: dict[str, Reservation] = {}
        self._replaced: dict[str, Reservation] = {}
        """By device: the reservation that a hard one replaced, which kept the device from all tasks tried earlier."""
        self._soft = self._hard = 0
        ledger.keep(self._by_device)

    def may_reserve(self, *, is_hard: bool) -> bool:
        """True if one more waiting task may have a reservation."""
        devices = len(self._ledger.states)
        return self._hard < devices if is_hard else self._soft < RESERVED_MAX and len(self._by_device) < devices

    def kept(self, device: str, task: str) -> Reservation | None:
        """The reservation of this device, for another task, when the task was last tried; None if there was none."""
        seen = self.seen.get(task, self.number)
        for kept in (self._by_device.get(device), self._replaced.get(device)):
            if kept is not None and kept.task != task and kept.number < seen:
                return kept
        return None

    def allows(self, state: DeviceState, ask: DeviceRequest, task: str = "") -> bool:
        """True if a later task may start on this device; with ``task``, as when that task was last tried."""
        kept = self.kept(state.id, task) if task else self._by_device.get(state.id)
        if kept is None:
            return True
        if kept.is_hard:
            return False
        if self.now_s + ask.run_s <= kept.starts_s:
            return ask.run_s < NEVER_S
        return kept.starts_s < NEVER_S and self._leaves_room(state, kept, ask)

    def _leaves_room(self, state: DeviceState, kept: Reservation, ask: DeviceRequest) -> bool:
        """True if there is room for both at S."""
        if (
            state.device.kind != GPU
            or kept.ask.wants_empty_on(state.device)
            or ask.wants_empty_on(state.device)
            or not state.device.mem_bytes
        ):
            return False
        over = [key for key, grant in state.grants.items() if grant.ends_s <= kept.starts_s]
        config = self._ledger.config
        needs = [one.bytes_of(state.device) for one in (kept.ask, ask)]
        if None in needs:
            return False
        staying = [grant for key, grant in state.grants.items() if key not in over]
        count = len(staying) + state.foreign + 2
        activity = sum(grant.ask.activity for grant in staying) + kept.ask.activity + ask.activity
        is_small = sum(need or 0 for need in needs) <= state.free_bytes(self.now_s, over)
        return is_small and count <= config.tasks_max and activity <= config.activity_max

    def reserve(
        self, request: ResourceRequest, ask: DeviceRequest, waited_s: float, held: tuple[str, ...] = (), task: str = ""
    ) -> Reservation | None:
        """Reserve devices for a task that does not fit, preferably devices without a reservation. ``held``: its devices
        when its reservation hardened. None if there are not enough healthy devices."""
        is_hard = self.is_hard(ask.run_s, waited_s)
        if is_hard and held and all(self._is_sound(name) for name in held):
            devices, starts_s = held, self.now_s
        else:
            found = self._soonest(request, ask, waited_s)
            if found is None:
                return None
            devices, starts_s = found
        reservation = Reservation(ask, devices, starts_s, self.number, task, is_hard)
        self.number += 1
        if is_hard:
            self._hard += 1
        else:
            self._soft += 1
        for name in devices:
            before = self._by_device.setdefault(name, reservation)
            if is_hard and not before.is_hard:  # earlier tasks are still tried first
                self._by_device[name] = reservation
                self._replaced[name] = before
        return reservation

    def is_hard(self, run_s: float, waited_s: float) -> bool:
        """True if the reservation of a task has hardened: it will run for ``run_s`` and has waited for ``waited_s``."""
        own_s = STARVES_AFTER_RUNS * run_s if run_s < NEVER_S else 0.0
        return waited_s >= max(self._ledger.config.starve_after_s, own_s)

    def _is_sound(self, name: str) -> bool:
        state = self._ledger.states.get(name)
        return state is not None and state.reading.health.is_usable

    def _soonest(
        self, request: ResourceRequest, ask: DeviceRequest, waited_s: float
    ) -> tuple[tuple[str, ...], float] | None:
        """The devices that have room first, and when. Among equals, devices without a reservation come first."""
        chosen: list[str] = []
        starts_s = self.now_s
        wanted = [(self._ledger.of_kind(kind), count) for kind, count in request.devices]
        if request.gpus:
            wanted.append((Scope(self._ledger, request, waited_s).all, request.gpus))
        for states, count in wanted:
            times = sorted(
                (self._room_at_s(state, ask), state.id in self._by_device, place, state.id)
                for place, state in enumerate(states)
                if self._is_sound(state.id)
            )
            if len(times) < count:
                return None
            chosen += [name for *_, name in times[:count]]
            starts_s = max(starts_s, times[count - 1][0])
        return tuple(chosen), starts_s

    def _room_at_s(self, state: DeviceState, ask: DeviceRequest) -> float:
        """The time at which enough of its tasks are expected to have ended."""
        if not state.why_not(ask, self.now_s):
            return self.now_s
        over: list[str] = []
        for grant in sorted(state.grants.values(), key=lambda grant: (grant.ends_s, grant.key)):
            over.append(grant.key)
            if not state.why_not(ask, self.now_s, over):
                return max(grant.ends_s, self.now_s)
        return math.inf
