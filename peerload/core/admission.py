"""What fits where: who could ever run a task (by profile), and what fits on this node now (by the ledger). Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peerload.model.resources import Placement, Profile, ResourceRequest

EPSILON = 1e-9
"""Fractions of a core are sums of floats; nobody is refused for a rounding error."""


def why_never(profile: Profile, request: ResourceRequest, placement: Placement, home: str) -> str:
    """Why this node could never run the task, in words; "" if it could. ``home``: the task's home node."""
    if placement.node is not None and placement.node != profile.node:
        return f"the task is for {placement.node}"
    if placement.local and profile.node != home:
        return "the task stays at its home"
    if profile.node in placement.exclude:
        return "the task excludes it"
    if placement.labels:
        missing = [label for label in placement.labels if label not in profile.labels]
        if missing:
            return f"no label {', '.join(missing)}"
    if profile.slots < 1:
        return "it takes no tasks (0 slots)"
    if request.cpus > profile.cpus + EPSILON:
        return f"{profile.cpus:g} cpus, asked {request.cpus:g}"
    if profile.mem_bytes and request.mem_bytes > profile.mem_bytes:
        return f"{profile.mem_bytes / 2**30:.1f} GiB of memory, asked {request.mem_bytes / 2**30:.1f}"
    if request.gpus > profile.gpus:
        return "no GPU" if not profile.gpus else f"{profile.gpus} GPUs, asked {request.gpus}"
    return ""


class Ledger:
    """The tasks of this node by what they hold: running, waiting, and inbound (accepted or promised, on its way).

    n counts all three. It is the number of tasks in units of slots: where a task asks for several cores it counts for
    as many slots as these are worth, and where the number of slots was not set by hand, half a core counts for half.
    version grows with every change, so that whoever has looked knows whether there is anything new to see.
    """

    __slots__ = (
        "_cpus_inbound",
        "_cpus_waiting",
        "_mem_bytes",
        "cpus_requested",
        "cpus_running",
        "inbound",
        "load_tasks",
        "profile",
        "running",
        "running_local",
        "version",
        "waiting",
        "waiting_local",
        "waiting_remote",
    )

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.running: dict[str, tuple[ResourceRequest, bool]] = {}
        self.inbound: dict[bytes, ResourceRequest] = {}
        self.running_local = 0
        self.waiting = 0
        self.waiting_local = 0
        self.waiting_remote = 0
        self.cpus_running = 0.0
        """Cores held by what runs."""
        self._cpus_waiting = 0.0
        self._cpus_inbound = 0.0
        self._mem_bytes = 0
        self.cpus_requested = 0.0
        """Cores asked for by all of them."""
        self.load_tasks = 0
        """n: running + waiting + inbound, in slots."""
        self.version = 0

    def _changed(self) -> None:
        """After every change: n is read far more often than it changes."""
        self.version += 1
        self.cpus_requested = self.cpus_running + self._cpus_waiting + self._cpus_inbound
        count = len(self.running) + self.waiting + len(self.inbound)
        profile = self.profile
        if profile.cpus > 0:
            demand = math.ceil(self.cpus_requested * profile.slots / profile.cpus - EPSILON)
            count = max(count, demand) if profile.slots_fixed else max(demand, 1 if count else 0)
        self.load_tasks = count

    def fits(self, request: ResourceRequest) -> bool:
        """Whether it could be started now beside what is running."""
        return self._fits(request, len(self.running), self.cpus_running)

    def fits_beside_all(self, request: ResourceRequest) -> bool:
        """Whether it could be started now if everything waiting and inbound were running too."""
        return self._fits(request, len(self.running) + self.waiting + len(self.inbound), self.cpus_requested)

    def fits_without(self, keys: Iterable[str], request: ResourceRequest) -> bool:
        """Whether it could be started now if these attempts held nothing."""
        held = [(key, *self.running[key]) for key in keys]
        for key, _, _ in held:
            self.end(key)
        does_fit = self.fits(request)
        for key, request_held, is_local in held:
            self.start(key, request_held, is_local=is_local)
        return does_fit

    def _fits(self, request: ResourceRequest, count: int, cpus: float) -> bool:
        profile = self.profile
        if profile.slots_fixed and count >= profile.slots:
            return False
        if cpus + request.cpus > profile.cpus + EPSILON:
            return False
        if profile.mem_bytes and self._mem_bytes + request.mem_bytes > profile.mem_bytes:
            return False
        return not request.gpus or request.gpus + sum(held.gpus for held, _ in self.running.values()) <= profile.gpus

    def start(self, key: str, request: ResourceRequest, *, is_local: bool) -> None:
        """An attempt starts to hold what it asked for."""
        if key not in self.running:
            self.running[key] = (request, is_local)
            self.running_local += is_local
            self.cpus_running += request.cpus
            self._mem_bytes += request.mem_bytes
            self._changed()

    def end(self, key: str) -> bool:
        """An attempt holds nothing any more; False if it held nothing."""
        held = self.running.pop(key, None)
        if held is None:
            return False
        request, is_local = held
        self.running_local -= is_local
        self.cpus_running = self.cpus_running - request.cpus if self.running else 0.0
        self._mem_bytes -= request.mem_bytes
        self._changed()
        return True

    def wait(self, request: ResourceRequest, *, is_local: bool, by: int = 1) -> None:
        """A task joins (by=1) or leaves (by=-1) those waiting here."""
        self.waiting += by
        if is_local:
            self.waiting_local += by
        else:
            self.waiting_remote += by
        self._cpus_waiting = self._cpus_waiting + by * request.cpus if self.waiting else 0.0
        self._changed()

    def expect(self, uid: bytes, request: ResourceRequest) -> None:
        """A task is on its way here; one that was promised before is known better by now."""
        before = self.inbound.get(uid)
        if before != request:
            self.inbound[uid] = request
            self._cpus_inbound += request.cpus - (before.cpus if before is not None else 0.0)
            self._changed()

    def expect_no_more(self, uid: bytes) -> bool:
        """It has arrived or will not come; False if it was not expected."""
        request = self.inbound.pop(uid, None)
        if request is None:
            return False
        self._cpus_inbound = self._cpus_inbound - request.cpus if self.inbound else 0.0
        self._changed()
        return True
