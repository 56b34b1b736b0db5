"""Which devices of this node a task gets, all that it asks for or none: the preferred ones first, then the best of the
others.

`queue` waits for exactly the preferred GPUs; `schedule` takes any that fit. Among those, in this order: an empty one for a
task that may keep it busy, one that is not crowded, the one that has the least memory left over, of several GPUs those that are nearest to each
other, the cooler, the lower number. Pure.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from itertools import combinations
from typing import TYPE_CHECKING

from peerload.core.resources.devices import ACTIVITY_HALF, CROWDED
from peerload.model.devices import GPU, GpuWait, Nearness

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from peerload.core.resources.device_ledger import DeviceLedger
    from peerload.core.resources.devices import DeviceRequest, DeviceState
    from peerload.model.devices import Device
    from peerload.model.resources import ResourceRequest

    Rank = Callable[[DeviceState], tuple[float, ...]]

COMBINATIONS_MAX = 2000
"""Sets of GPUs that are compared by how near they are; more than this, and they are gathered around each GPU in turn."""


class Scope:
    """Which GPUs of this node a task may have now. preferred: those it wants, the best first; others: those it takes if
    they have no room; is_narrow: it waits for the preferred ones alone; ``ends_s``: for so long, infinite = for ever."""

    __slots__ = ("is_narrow", "others", "preferred")

    def __init__(self, ledger: DeviceLedger, request: ResourceRequest, waited_s: float) -> None:
        states = ledger.of_kind(GPU)
        self.preferred = preferred(states, request.gpu_prefer)
        waits_s = request.gpu_wait_s_max
        self.is_narrow = (
            request.gpu_wait is GpuWait.QUEUE and bool(request.gpu_prefer) and not (waits_s and waited_s >= waits_s)
        )
        self.others = [] if self.is_narrow else [state for state in states if state not in self.preferred]

    @property
    def all(self) -> list[DeviceState]:
        """Both."""
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
    """The ids of the devices that the task is to have, None if there are not enough. ``allows``: whether a device that
    fits may be taken, considering who else waits for it; ``without``: as if these attempts were over."""

    def fits(state: DeviceState) -> bool:
        return allows(state, ask) and not state.why_not(ask, now_s, without)  # the cheaper first

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


def _gpus(scope: Scope, count: int, fits: Callable[[DeviceState], bool], rank: Rank) -> tuple[str, ...] | None:
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


def _rank(ask: DeviceRequest, now_s: float) -> Rank:
    """The smallest is the best."""

    def key(state: DeviceState) -> tuple[float, ...]:
        is_shared = bool(state.grants or state.foreign)
        need_bytes = None if ask.fraction < 1.0 and ask.need_bytes is None else ask.bytes_of(state.device)
        prefers_empty = need_bytes is None or ask.activity > ACTIVITY_HALF
        left = state.free_bytes(now_s) - (ask.bytes_of(state.device) or 0)
        crowding = max(state.activity + ask.activity - CROWDED, 0.0)
        return is_shared and prefers_empty, crowding, left, state.reading.temperature_c, state.device.index

    return key


def nearest(chosen: Sequence[DeviceState], ranked: Sequence[DeviceState], count: int) -> tuple[DeviceState, ...]:
    """``count`` of the ranked: those with the shortest longest way among them and the chosen; of equal ones the first."""
    if count == 1 and not chosen:
        return (ranked[0],)
    sets = list(_limited(ranked, count))
    widths = [_width([*chosen, *some]) for some in sets]
    return sets[widths.index(min(widths))]


def _limited(ranked: Sequence[DeviceState], count: int) -> Sequence[tuple[DeviceState, ...]]:
    """The sets to be compared, the better-ranked first."""
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


def _width(states: Sequence[DeviceState]) -> tuple[int, int]:
    """The longest way between any two, then all ways together."""
    ways = [distance(one, other) for one, other in combinations(states, 2)]
    return max(ways, default=0), sum(ways)


def distance(one: DeviceState, other: DeviceState) -> int:
    """Distance of two devices (`Nearness`); not known counts as far."""
    links = dict(one.device.links)
    return links.get(other.id, Nearness.SYSTEM)


def preferred(states: Sequence[DeviceState], names: Sequence[str]) -> list[DeviceState]:
    """The devices that these names mean, in this order, each once."""
    found: list[DeviceState] = []
    for name in names:
        found += [state for state in states if state not in found and is_meant(state.device, name)]
    return found


def is_meant(device: Device, name: str) -> bool:
    """True if a user's word for GPUs (a number, the beginning of a name, a pattern of models) means this one."""
    if name.isdecimal():
        return device.index == int(name)
    if device.name.lower().startswith(name.lower()):
        return True
    return fnmatchcase(device.model.lower(), name.lower()) or fnmatchcase(device.model.lower(), f"* {name.lower()}")
