"""Admission: which nodes could ever run a task (by profile), what fits on this node now (by the ledger), other nodes as
seen by a task that asks for GPUs, and the line of tasks that wait for devices."""

from __future__ import annotations

import math
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING

import msgspec

from peerload.core.estimates import ANY_MODEL, NOTHING_LEARNED
from peerload.core.resources.devices import (
    CROWDED,
    EPSILON,
    LEARNED_SHARE,
    NEVER_S,
    DeviceLedger,
    DeviceRequest,
    counted,
)
from peerload.core.resources.placement import Backfill, matches_device, place, waits_for_preferred
from peerload.core.work import RemoteTask
from peerload.model.config import GpuConfig
from peerload.model.resources import (
    BUILDERS,
    GPU,
    LOAD_MAX,
    MIB,
    OVERCOMMIT_SHARE,
    Device,
    GpuShare,
    GpuWait,
    Placement,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from peerload.core.state import CoreState
    from peerload.core.work import Work
    from peerload.model.resources import DeviceLoad, LoadReport, PowerCurve, Profile, ResourceRequest


ANYWHERE = Placement()
"""The placement of a task without wishes of its user."""


def why_never(profile: Profile, request: ResourceRequest, placement: Placement, home: str) -> str:
    """The reason why a node could never run the task; "" if it could. ``home``: the task's home node."""
    if placement != ANYWHERE and (reason := _why_not_placed(profile, placement, home)):
        return reason
    if profile.slots < 1:
        return "it takes no tasks (0 slots)"
    if request.cpus > profile.cpus + EPSILON:
        return f"{profile.cpus:g} cpus, asked {request.cpus:g}"
    if profile.power is not None and profile.power.exceeds_cap(request.cpus):
        return f"{under_cap_text(profile.power, profile.cpus)}, asked {request.cpus:g}"
    if profile.mem_bytes and request.mem_bytes > profile.mem_bytes:
        return f"{profile.mem_bytes / 2**30:.1f} GiB of memory, asked {request.mem_bytes / 2**30:.1f} GiB"
    if request.gpu_share is GpuShare.MPS:
        if not profile.mps or not any(gpu.has_mps for gpu in profile.devices):
            return "no MPS"
        if profile.mps == "home" and home != profile.node:
            return "no MPS for guests, who each run as another user"
    return _why_no_devices(profile, request) if request.gpus or request.devices else ""


def _why_not_placed(profile: Profile, placement: Placement, home: str) -> str:
    """The reason from the placement that its user asked for."""
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
    if placement.builder and placement.builder not in profile.builders:
        return f"it lacks the program that builds its environment: {BUILDERS[placement.builder]}"
    return ""


def under_cap_text(power: PowerCurve, cpus: float) -> str:
    """Cores that its power cap allows for tasks, as text."""
    return f"{power.threads_under_cap(cpus):g} cpus under its power cap ({power.cap_w:g} W)"


def _why_no_devices(profile: Profile, request: ResourceRequest) -> str:
    """The reason from the requested devices."""
    for kind, count in request.devices:
        found = sum(device.kind == kind for device in profile.devices)
        if found < count:
            return f"{found} {kind}, asked {count}" if found else f"no {kind}"
    if not request.gpus:
        return ""
    if not profile.gpus:
        return "no GPU"
    gpus = [device for device in profile.devices if device.kind == GPU]
    if not gpus:  # only their number is known
        gpus = [Device(f"{GPU}:{number}", index=number) for number in range(profile.gpus)]
    large = [gpu for gpu in gpus if not gpu.mem_bytes or _need_bytes(request, gpu) <= _most_bytes(gpu)]
    if len(large) < request.gpus:
        if len(gpus) >= request.gpus and not large:
            best = max(gpus, key=_most_bytes)
            part = f"{request.gpu_fraction:g} of one, " if request.gpu_fraction < 1.0 else ""
            need = f"{part}{_gib(_need_bytes(request, best))}"
            return f"{gpus_text(gpus)} of which tasks may have {_gib(_most_bytes(best))}, asked {need}"
        asked = f"asked {request.gpus}" + (f" with {_gib(request.gpu_mem_bytes)}" if request.gpu_mem_bytes else "")
        return f"{gpus_text(gpus)}, {asked}"
    if waits_for_preferred(request, math.inf):
        meant = [gpu for gpu in large if any(matches_device(gpu, name) for name in request.gpu_prefer)]
        if len(meant) < request.gpus:
            return f"no GPU {', '.join(request.gpu_prefer)}" if not meant else f"only {len(meant)} of those GPUs"
    return ""


def _need_bytes(request: ResourceRequest, gpu: Device) -> int:
    """The memory that a task needs of this GPU, 0 = unknown: as stated, or its share of the GPU's memory."""
    if request.gpu_mem_bytes or request.gpu_fraction >= 1.0:
        return request.gpu_mem_bytes
    return int(gpu.mem_bytes * request.gpu_fraction)


def _most_bytes(gpu: Device) -> int:
    """The memory of this GPU that one task can get."""
    return gpu.grantable_bytes or gpu.mem_bytes


def gpu_mem_bytes_max(profile: Profile, request: ResourceRequest, placement: Placement, home: str) -> int | None:
    """The memory of each GPU that a node could ever give this task: 0 if it cannot run there, None = unknown."""
    anything = msgspec.structs.replace(request, gpu_mem_bytes=0)
    if why_never(profile, anything, placement, home):
        return 0
    gpus = [device for device in profile.devices if device.kind == GPU]
    if waits_for_preferred(request, math.inf):
        gpus = [gpu for gpu in gpus if any(matches_device(gpu, name) for name in request.gpu_prefer)]
    sizes = sorted((_most_bytes(gpu) for gpu in gpus if gpu.mem_bytes), reverse=True)
    if len(sizes) < len(gpus) or len(sizes) < request.gpus:
        return None
    return sizes[request.gpus - 1]


def lacks(profile: Profile, request: ResourceRequest, placement: Placement, home: str) -> list[str]:
    """Reasons why a node can never run a task; empty if it can."""
    found = []
    anything, anywhere = type(request)(cpus=min(request.cpus, profile.cpus or request.cpus)), type(placement)()
    devices = _why_no_devices(profile, request)
    if devices:
        found.append(devices)
    elsewhere = why_never(profile, anything, placement, home)
    if elsewhere:
        found.append(elsewhere)
    rest = why_never(profile, type(request)(cpus=request.cpus, mem_bytes=request.mem_bytes), anywhere, home)
    return [*found, rest] if rest and rest not in found else found


def asked_text(request: ResourceRequest, placement: Placement) -> str:
    """The request of a task beyond one core, as text."""
    parts = []
    if request.gpus:
        share = f"{request.gpu_fraction:g} of a GPU" if request.gpu_fraction < 1 else counted(request.gpus, "GPU")
        parts.append(share + (f" with {_gib(request.gpu_mem_bytes)}" if request.gpu_mem_bytes else ""))
    parts += [counted(count, kind) for kind, count in request.devices]
    if request.cpus != 1:
        parts.append(f"{request.cpus:g} cpus")
    if request.mem_bytes:
        parts.append(f"{_gib(request.mem_bytes)} of memory")
    parts += [f"label {label}" for label in placement.labels]
    return " and ".join(parts)


def needs_text(request: ResourceRequest, placement: Placement) -> str:
    asked = asked_text(request, placement)
    if request.cpus != 1:
        return asked
    return f"1 cpu and {asked}" if asked else "1 cpu"


def gpus_text(gpus: Sequence[Device]) -> str:
    """The GPUs of a node as text: ``8 x 48 GiB``; different ones joined by "and"."""
    sizes: dict[int, int] = {}
    for gpu in gpus:
        sizes[gpu.mem_bytes] = sizes.get(gpu.mem_bytes, 0) + 1
    known = " and ".join(f"{count} x {_gib(size)}" for size, count in sizes.items() if size)
    return known or f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 1 << 30 else f"{size / 2**20:.3g} MiB"


def asked_of(state: CoreState, work: Work, profile: Profile | None = None) -> ResourceRequest:
    """The effective request of work to other nodes, which may not know its command: with the memory of each GPU that
    the command is known to need, unless the user stated it. ``profile``: of the node asked, None = any. If that node
    could not promise this much, the request stays as it is, and asks for an empty GPU."""
    request = work.spec.request
    if not request.gpus:
        return request
    need_bytes = state.learned_gpu_bytes(work, (ANY_MODEL,)).get(ANY_MODEL, 0)
    if not need_bytes:
        return request
    if profile is not None:
        most_bytes = gpu_mem_bytes_max(profile, request, work.spec.placement, state.node)
        if most_bytes is None or need_bytes > LEARNED_SHARE * most_bytes:
            return request
    return msgspec.structs.replace(request, gpu_mem_bytes=need_bytes)


CROWD_MIN = 3
"""A GPU with this number of tasks counts as crowded on other nodes."""


def seen_by(request: ResourceRequest, report: LoadReport) -> LoadReport:
    """A node's report as seen by this task. For a task that asks for GPUs, loads are in GPUs instead of slots, and a
    node accepts if it has room now. So a policy that compares nodes by tasks and slots places such tasks by GPUs
    without knowing of GPUs."""
    if not request.gpus:
        return report
    return msgspec.structs.replace(
        report,
        load_tasks=report.gpu_tasks,
        slots_foreign=0,
        slots=report.gpus,
        load=report.gpu_load,
        accepts=has_room(request, report),
    )


def has_room(request: ResourceRequest, report: LoadReport) -> bool:
    """True if a node has room for its GPUs and cores, according to its report."""
    if request.cpus > report.cpus_free + EPSILON:
        return False
    if report.gpus_free >= request.gpus:
        return True
    gpus = report.devices[: report.gpus]  # GPUs come first
    return sum(_could_join(request, device) for device in gpus) >= request.gpus


def has_memory(request: ResourceRequest, profile: Profile, requested_bytes: int) -> bool:
    """True if a node has memory for this request in addition to ``requested_bytes``."""
    return not (profile.mem_bytes and request.mem_bytes) or requested_bytes + request.mem_bytes <= profile.mem_bytes


def cpus_free_there(profile: Profile, report: LoadReport) -> tuple[float, float]:
    """Bounds of a node's cores without a task, from its report: n is in slots, rounded up."""
    cpus = profile.cpus if profile.power is None else profile.power.threads_under_cap(profile.cpus)
    each = profile.cpus / max(profile.slots, 1)
    least = max(cpus - report.load_tasks * each, 0.0)
    if report.cpus_free < LOAD_MAX and not report.waiting:
        least = max(report.cpus_free - (profile.cpus - cpus) - report.slots_foreign * each, least)
    if profile.slots_fixed or report.load_tasks <= 1:
        return least, cpus
    return least, min(least + each, cpus)


def claims_room(request: ResourceRequest, profile: Profile, report: LoadReport) -> bool:
    """True if a node's report says that it would take such a task: it has room, or lets tasks wait."""
    if request.takes_devices:
        return request.gpus > 0 and has_room(request, report)
    if not report.accepts or report.load_tasks >= profile.slots:
        return report.accepts
    has_cores = request.cpus <= cpus_free_there(profile, report)[0] + EPSILON
    return has_cores and has_memory(request, profile, report.mem_requested_bytes)


def slots_of(request: ResourceRequest, profile: Profile) -> int:
    """Number of slots of a node that a task counts for, at least one."""
    return max(ceil(request.cpus * profile.slots / profile.cpus - EPSILON), 1) if profile.cpus > 0 else 1


def offers_good_gpus(request: ResourceRequest, profile: Profile, report: LoadReport | None) -> bool:
    """True if another node has room on GPUs that are not crowded, and among the preferred ones if there is a preference
    (a number means a GPU of the task's home). ``report``: the node's load, None = unknown, which counts as room."""
    gpus = [device for device in profile.devices if device.kind == GPU]
    if request.gpu_prefer:
        names = [name for name in request.gpu_prefer if not name.isdecimal()]
        gpus = [gpu for gpu in gpus if any(matches_device(gpu, name) for name in names)]
    if len(gpus) < request.gpus or report is None or not report.devices:
        return len(gpus) >= request.gpus
    if request.cpus > report.cpus_free + EPSILON:
        return False
    loads = {load.mark: load for load in report.devices}
    told = [loads[gpu.mark] for gpu in gpus if gpu.mark in loads]
    return sum(load.tasks < CROWD_MIN and _could_join(request, load) for load in told) >= request.gpus


def _could_join(request: ResourceRequest, device: DeviceLoad) -> bool:
    """True if a task could start on this GPU: a free one, or a shared one with enough room."""
    if device.is_free:
        return True
    if request.gpu_share is GpuShare.EXCLUSIVE or device.free_mib * MIB < request.gpu_mem_bytes:
        return False
    if request.gpu_fraction < 1.0:
        return device.free_percent >= math.ceil(request.gpu_fraction * 100)
    return request.gpu_mem_bytes > 0 and device.free_slots > 0


RISES_AT = 0.75
"""Share of one more slot that foreign load must keep busy before the slot counts."""
FALLS_AT = 0.25
"""Share of a counted slot that must be kept busy; below it the slot no longer counts."""


def foreign_slots(before: int, cores: float, cpus: float, slots: int) -> int:
    """The number of ``slots`` that foreign programs occupy if they keep ``cores`` of ``cpus`` busy; ``before``: so far.

    The sensors report foreign load averaged over 15 s. Here it is rounded to slots with hysteresis, so that a load near
    half a slot does not change every report. Foreign slots count in n: in the load index, in the acceptance test and in
    every report. They never keep a task of this node from starting here, which would block a busy workstation.
    """
    if cpus <= 0 or slots <= 0:
        return 0
    exact = min(cores / cpus, 1.0) * slots
    if exact >= before + RISES_AT:
        return min(math.floor(exact + 1.0 - RISES_AT), slots)
    if exact <= before - 1 + FALLS_AT:
        return max(math.ceil(exact - FALLS_AT), 0)
    return min(before, slots)


TRIED_MAX = 64
"""Limit on tasks that wait for devices or are inbound for them; with more, no other task has room."""


class Ledger:
    """The tasks of this node and their resources: running, waiting, and inbound (accepted or promised, but not here).

    n counts all three, plus the slots that foreign programs occupy, in units of slots. A task that asks for several
    cores counts for as many slots as these are worth; unless the number of slots was set by hand, half a core counts
    for half. Tasks that wait for devices are not in n, because they keep no task from the cores. version grows with
    every change, so that readers can tell whether anything changed.
    """

    __slots__ = (
        "_cpus_waiting",
        "_device_waiters",
        "_gpus_waiting",
        "_mem_waiting_bytes",
        "_waiting_for_devices",
        "cpus_inbound",
        "cpus_requested",
        "cpus_running",
        "devices",
        "foreign_slots",
        "inbound",
        "kept",
        "load_tasks",
        "load_version",
        "mem_inbound_bytes",
        "mem_promised_bytes",
        "now_s",
        "profile",
        "room_version",
        "running",
        "running_local",
        "version",
        "waiting",
        "waiting_local",
        "waiting_remote",
    )

    def __init__(self, profile: Profile, gpu: GpuConfig = GpuConfig()) -> None:  # noqa: B008 -- frozen
        self.profile = profile
        self.devices = DeviceLedger(profile, gpu)
        self.kept = Backfill(self.devices, 0.0)
        """Devices that are reserved for tasks that wait for them here."""
        self.running: dict[str, tuple[ResourceRequest, bool]] = {}
        self.inbound: dict[bytes, ResourceRequest] = {}
        self.running_local = 0
        self.waiting = 0
        self.waiting_local = 0
        self.waiting_remote = 0
        self.cpus_running = 0.0
        """Cores of running tasks."""
        self._cpus_waiting = 0.0
        self.cpus_inbound = 0.0
        """Cores of inbound tasks."""
        self.mem_promised_bytes = 0
        """Memory promised to running tasks."""
        self._mem_waiting_bytes = 0
        self.mem_inbound_bytes = 0
        """Memory of inbound tasks."""
        self._waiting_for_devices: dict[ResourceRequest, int] = {}
        self._device_waiters = 0
        self._gpus_waiting = 0.0
        self.cpus_requested = 0.0
        """Cores that all tasks ask for, except those that wait for devices."""
        self.foreign_slots = 0
        self.load_tasks = 0
        """n: running + waiting + inbound, in slots, and the foreign slots."""
        self.version = 0
        """Grows with every change of the tasks here."""
        self.load_version = 0
        """Grows with everything that the load depends on: version, profile, and sensor readings."""
        self.room_version = 0
        """Grows with every change of the running tasks."""
        self.now_s = 0.0
        """The current time, for predictions about devices."""

    def _changed(self) -> None:
        """Update n after every change, because n is read far more often than it changes."""
        self.version += 1
        self.load_version += 1
        self.cpus_requested = cpus = self.cpus_running + self._cpus_waiting + self.cpus_inbound
        count = len(self.running) + self.waiting - self._device_waiters + len(self.inbound)
        self.load_tasks = self._in_slots(count, cpus) + self.foreign_slots

    def _in_slots(self, count: int, cpus: float) -> int:
        profile = self.profile
        if profile.cpus <= 0:
            return count
        demand = ceil(cpus * profile.slots / profile.cpus - EPSILON)
        return max(count if profile.slots_fixed else min(count, 1), demand)

    def load_tasks_without(self, request: ResourceRequest) -> int:
        """n without one such task that waits here."""
        if request.takes_devices:
            return self.load_tasks
        return self._in_slots(self._count - 1, self.cpus_requested - self.cores_of(request)) + self.foreign_slots

    def set_profile(self, profile: Profile) -> None:
        self.profile = profile
        self.load_version += 1

    def set_foreign_slots(self, slots: int) -> None:
        """Set the number of slots that foreign programs occupy."""
        if slots != self.foreign_slots:
            self.foreign_slots = slots
            self._changed()

    @property
    def _count(self) -> int:
        """Number of tasks, except those that wait for devices."""
        return len(self.running) + self.waiting - self._device_waiters + len(self.inbound)

    @property
    def mem_requested_bytes(self) -> int:
        """Memory that all tasks ask for, except those that wait for devices."""
        return self.mem_promised_bytes + self.mem_inbound_bytes + self._mem_waiting_bytes

    def has_memory_beside_all(self, request: ResourceRequest) -> bool:
        """True if its memory would be free if all waiting and inbound tasks were running."""
        return has_memory(request, self.profile, self.mem_requested_bytes)

    @property
    def is_oversubscribed(self) -> bool:
        """True if memory or the power cap prevents all tasks here from running at once, regardless of slots."""
        most_bytes = self.profile.mem_bytes
        return 0 < most_bytes < self.mem_requested_bytes or self.exceeds_cap(self.cpus_requested)

    @property
    def is_full(self) -> bool:
        """True if no task can start now, whatever it asks for."""
        return self.profile.slots_fixed and len(self.running) >= self.profile.slots

    def fits(self, request: ResourceRequest) -> bool:
        """True if it could start now beside the running tasks, after all tasks that wait for devices."""
        return self.has_cores(request) and (not request.takes_devices or self._has_devices(request, leaves_kept=True))

    def has_good_devices(self, request: ResourceRequest) -> bool:
        """True if it could start now on GPUs that are not crowded, and among the preferred ones if it prefers any."""
        if request.gpu_prefer:
            request = msgspec.structs.replace(request, gpu_wait=GpuWait.QUEUE, gpu_wait_s_max=0.0)
        return self._has_devices(request, leaves_kept=True, activity_max=CROWDED)

    @property
    def cpus_free(self) -> float:
        """Cores that neither running nor inbound tasks have."""
        return max(self.profile.cpus - self.cpus_running - self.cpus_inbound, 0.0)

    def has_cores(self, request: ResourceRequest) -> bool:
        """True if its cores and memory are free now."""
        return self._fits(request, len(self.running), self.cpus_running)

    def fits_beside_all(self, request: ResourceRequest) -> bool:
        """True if it could start now beside the foreign load, if all waiting and inbound tasks were running too. For a
        task that takes devices only the cores of running tasks, inbound tasks and tasks waiting for devices count,
        because it does not wait behind tasks that wait for cores."""
        if not request.takes_devices:
            foreign_cpus = self.foreign_slots * self.profile.cpus / max(self.profile.slots, 1)
            cpus = self.cpus_requested + foreign_cpus
            return self._fits(request, self._count + self.foreign_slots, cpus, self.mem_requested_bytes)
        others = [one for one in self.inbound.values() if one.takes_devices]
        if len(others) + self._device_waiters > TRIED_MAX:
            return False
        count, cpus = len(self.running) + len(self.inbound), self.cpus_running + self.cpus_inbound
        mem_bytes = self.mem_promised_bytes + self.mem_inbound_bytes
        for waiting, number in self._waiting_for_devices.items():
            others += [waiting] * number
            cpus += self.cores_of(waiting) * number
            mem_bytes += waiting.mem_bytes * number
        return self._fits(request, count, cpus, mem_bytes) and self._has_devices(request, others, leaves_kept=True)

    def _has_devices(
        self,
        request: ResourceRequest,
        others: Sequence[ResourceRequest] = (),
        without: Sequence[str] = (),
        *,
        leaves_kept: bool = False,
        activity_max: float = math.inf,
    ) -> bool:
        """True if its devices are free after the ``others`` got theirs, as far as they fit, and without the attempts
        ``without``. ``leaves_kept``: devices reserved for a waiting task are not free; ``activity_max``: nor are
        devices with more work than this, its own included."""
        devices, tried = self.devices, []
        for number, other in enumerate(others):
            ask = DeviceRequest(other, devices.config)
            names = place(devices, other, ask, self.now_s)
            if names:
                tried.append(f"?{number}")
                devices.grant(tried[-1], names, ask, self.now_s)
        try:
            ask = DeviceRequest(request, devices.config)
            ask.activity_max = min(ask.activity_max, activity_max)
            if not leaves_kept:
                return place(devices, request, ask, self.now_s, without=without) is not None
            self.kept.now_s = self.now_s
            return place(devices, request, ask, self.now_s, allows=self.kept.allows) is not None
        finally:
            for key in tried:
                devices.take_back(key)

    def fits_without(self, keys: Iterable[str], request: ResourceRequest) -> bool:
        """True if it could start now if these attempts held nothing."""
        keys = list(keys)
        held = [self.running[key][0] for key in keys]
        count, cpus = len(self.running) - len(held), self.cpus_running - sum(map(self.cores_of, held))
        mem_bytes = self.mem_promised_bytes - sum(one.mem_bytes for one in held)
        return self._fits(request, count, cpus, mem_bytes) and (
            not request.takes_devices or self._has_devices(request, without=keys)
        )

    def _fits(self, request: ResourceRequest, count: int, cpus: float, mem_bytes: int | None = None) -> bool:
        profile = self.profile
        used_bytes = self.mem_promised_bytes if mem_bytes is None else mem_bytes
        if profile.slots_fixed and count >= profile.slots:
            return False
        cpus += self.cores_of(request)
        if cpus > profile.cpus + EPSILON:
            return False
        if self.exceeds_cap(cpus):
            return False
        return has_memory(request, profile, used_bytes)

    def cores_of(self, request: ResourceRequest) -> float:
        """Cores that a task is guaranteed while it runs here."""
        if request.overcommit and self.profile.enforces_cores:
            return request.cpus * OVERCOMMIT_SHARE
        return request.cpus

    def recount(self, waiting: Iterable[Work]) -> None:
        """Recount the cores of all tasks after the rule for them has changed."""
        self.cpus_running = sum((self.cores_of(request) for request, _ in self.running.values()), 0.0)
        self.cpus_inbound = sum(map(self.cores_of, self.inbound.values()), 0.0)
        requests = ((work.spec.request, work.count) for work in waiting)
        self._cpus_waiting = sum((n * self.cores_of(one) for one, n in requests if not one.takes_devices), 0.0)
        self._changed()

    def exceeds_cap(self, cpus: float) -> bool:
        """True if this number of busy cores would exceed the power cap for tasks."""
        return self.profile.power is not None and self.profile.power.exceeds_cap(cpus)

    def start(
        self,
        key: str,
        request: ResourceRequest,
        *,
        is_local: bool,
        devices: Sequence[str] = (),
        run_s: float = math.inf,
        learned: Mapping[str, int] = NOTHING_LEARNED,
        owner: str | None = "",
    ) -> None:
        """Book the resources of a starting attempt, and these devices. run_s: its run time with high probability;
        learned, owner: as in `DeviceRequest`."""
        if key not in self.running:
            if devices:
                ask = DeviceRequest(request, self.devices.config, learned, run_s, owner)
                self.devices.grant(key, devices, ask, self.now_s)
            self.running[key] = (request, is_local)
            self.running_local += is_local
            self.cpus_running += self.cores_of(request)
            self.mem_promised_bytes += request.mem_bytes
            self.room_version += 1
            self._changed()

    def end(self, key: str) -> bool:
        """Release the resources of an ended attempt, except devices that its processes may still use. False if it held
        none."""
        held = self.running.pop(key, None)
        if held is None:
            return False
        self.devices.end(key, self.now_s)
        request, is_local = held
        self.running_local -= is_local
        self.cpus_running = self.cpus_running - self.cores_of(request) if self.running else 0.0
        self.mem_promised_bytes -= request.mem_bytes
        self.room_version += 1
        self._changed()
        return True

    @property
    def gpu_tasks(self) -> int:
        """n in GPUs: the number of GPUs that all tasks here ask for."""
        asked = [request for request, _ in self.running.values()]
        asked += self.inbound.values()
        return math.ceil(self._gpus_waiting + sum(one.gpus * one.gpu_fraction for one in asked if one.gpus) - EPSILON)

    @property
    def waits_for_devices(self) -> bool:
        """True if any task here waits for devices."""
        return bool(self._waiting_for_devices)

    def wait(self, request: ResourceRequest, *, is_local: bool, by: int = 1) -> None:
        """Count tasks that join (by > 0) or leave (by < 0) those waiting here."""
        self.waiting += by
        if is_local:
            self.waiting_local += by
        else:
            self.waiting_remote += by
        if request.gpus or request.devices:
            left = self._waiting_for_devices.pop(request, 0) + by
            if left > 0:
                self._waiting_for_devices[request] = left
            self._device_waiters += by
            gpus = by * request.gpus * request.gpu_fraction
            self._gpus_waiting = self._gpus_waiting + gpus if self._device_waiters else 0.0
        else:
            waits = self.waiting > self._device_waiters
            self._mem_waiting_bytes += by * request.mem_bytes
            self._cpus_waiting = self._cpus_waiting + by * self.cores_of(request) if waits else 0.0
        self._changed()

    def expect(self, uid: bytes, request: ResourceRequest) -> None:
        """Count an inbound task, or correct its request if it was counted before."""
        before = self.inbound.get(uid)
        if before != request:
            self.inbound[uid] = request
            self.cpus_inbound += self.cores_of(request) - (self.cores_of(before) if before is not None else 0.0)
            self.mem_inbound_bytes += request.mem_bytes - (before.mem_bytes if before is not None else 0)
            self._changed()

    def expect_no_more(self, uid: bytes) -> bool:
        """Stop counting a task that has arrived or will not come; False if it was not expected."""
        request = self.inbound.pop(uid, None)
        if request is None:
            return False
        self.cpus_inbound = self.cpus_inbound - self.cores_of(request) if self.inbound else 0.0
        self.mem_inbound_bytes -= request.mem_bytes
        self._changed()
        return True


LOOKED_AT_MAX = 32
"""Limit on different requests of one scope that are tried; a scope: tasks that wait for the same GPUs, or for any."""
LOOKED_AT_IN_ALL_MAX = 256
PASSED_MAX = 1024
"""Limit on tasks of one scope that are scanned; those with a request that was tried before are skipped."""
SKIPPED_MAX = 16_384
"""Limit on tasks in line that are scanned; those of an exhausted scope are skipped."""
LineScope = tuple[tuple[str, ...] | None, tuple[str, ...]]
"""The GPUs that a task waits for, () = any, None = it takes none; and its other kinds of devices."""
ANY_GPU: LineScope = ((), ())


class DeviceQueue:
    """Start order of the tasks that wait for devices, and their reservations. One per queue.

    Tasks are tried in order. A task that fits starts; for one that does not, devices are reserved (`Backfill`), and
    later tasks start only if they do not delay it. A task that lacks only cores gets the next free ones.

    due_s: when a task that waits for certain GPUs will take others, infinite = never; lacks_cores: by priority, the
    first task whose devices are free but not its cores; depends_on_cores: with more cores, some task might start.
    """

    __slots__ = ("_failed", "_ledger", "_looked_at", "_state", "depends_on_cores", "due_s", "is_idle", "lacks_cores")

    def __init__(self, state: CoreState, ledger: Ledger) -> None:
        self._state = state
        self._ledger = ledger
        self._failed: set[tuple[object, ...]] = set()
        self._looked_at: dict[LineScope, int] = {}
        self.due_s = NEVER_S
        self.lacks_cores: dict[int, Work] = {}
        self.depends_on_cores = False
        self.is_idle = True
        """True if no task was tried since the last `begin`."""

    def begin(self) -> None:
        """Start a new scan of all waiting tasks, without reservations."""
        self.is_idle = True
        if self._ledger.kept.seen:  # otherwise there are no reservations
            self._ledger.kept = Backfill(self._ledger.devices, self._ledger.now_s)
        self._failed.clear()
        self._looked_at.clear()
        self.lacks_cores.clear()
        self.depends_on_cores = False
        self.due_s = NEVER_S

    def is_overdue(self, work: Work) -> bool:
        """True if it has waited so long that no task may overtake it."""
        return self._ledger.now_s - work.arrived_s >= self._ledger.devices.config.starve_after_s

    def first_that_fits(self, priority: int, line: Iterable[Work], before: Work | None) -> Work | None:
        """The first task that may start now, with its devices. ``before``: only tasks that arrived before this one may
        start."""
        self.is_idle = False
        failed, now_s = self._failed, self._ledger.now_s
        self._ledger.kept.now_s = now_s
        passed: dict[LineScope, int] = {}
        for work in islice(line, SKIPPED_MAX):
            lacking = self.lacks_cores.get(priority)
            if len(failed) >= LOOKED_AT_IN_ALL_MAX or (lacking is not None and self.is_overdue(lacking)):
                break
            if before is not None and work.order > before.order:
                self.depends_on_cores = True
                continue
            scope = self._scope(work)
            passed[scope] = passed.get(scope, 0) + 1
            is_done = passed[scope] > PASSED_MAX or self._looked_at.get(scope, 0) >= LOOKED_AT_MAX
            if is_done and scope == ANY_GPU:
                break
            key, run_s, learned = self._asks(work) if not is_done else (None, 0.0, {})
            if key is None or (key in failed and not self._may_reserve(work, run_s, is_soft_too=False)):
                continue
            if self._fits(work, run_s, learned):
                if self._ledger.has_cores(work.spec.request):
                    return work
                self.depends_on_cores = True
                if lacking is None:
                    self.lacks_cores[priority] = work
            if key not in failed:
                failed.add(key)
                self._looked_at[scope] = self._looked_at.get(scope, 0) + 1
        return None

    def _scope(self, work: Work) -> LineScope:
        request = work.spec.request
        waits = waits_for_preferred(request, self._ledger.now_s - work.arrived_s)
        kinds = tuple(kind for kind, _ in request.devices)
        return (request.gpu_prefer if waits else ()) if request.gpus else None, kinds

    def _asks(self, work: Work) -> tuple[tuple[object, ...], float, Mapping[str, int]]:
        """Key of its request, equal for all tasks with the same request now; bound on its run time, as far as known;
        its learned needs."""
        request, models = work.spec.request, self._ledger.devices.models
        run_s = self._state.run_s_max(work, models)
        learned = self._state.learned_gpu_bytes(work, models)
        waits_s = request.gpu_wait_s_max
        is_over = bool(waits_s) and self._ledger.now_s - work.arrived_s >= waits_s
        return (request, run_s, is_over, tuple(learned.items())), run_s, learned

    def _may_reserve(self, work: Work, run_s: float, *, is_soft_too: bool = True) -> bool:
        """True if devices may be reserved for it in addition to the hard reservations."""
        kept = self._ledger.kept
        is_hard = kept.is_hard(run_s, self._ledger.now_s - work.arrived_s)
        return bool(work.reserved) or ((is_hard or is_soft_too) and kept.may_reserve(is_hard=is_hard))

    def _fits(self, work: Work, run_s: float, learned: Mapping[str, int]) -> bool:
        """True if its devices are free; if not, reserve some for it."""
        request, now_s = work.spec.request, self._ledger.now_s
        waited_s = now_s - work.arrived_s
        home = work.home if isinstance(work, RemoteTask) else ""
        owner = self._ledger.devices.mps_owner(work.spec, home)
        ask = DeviceRequest(request, self._ledger.devices.config, learned, run_s, owner)
        if len(self._ledger.kept.seen) < PASSED_MAX:
            self._ledger.kept.seen[work.task] = self._ledger.kept.number
        names = place(self._ledger.devices, request, ask, now_s, waited_s, self._ledger.kept.allows)
        if names is not None:
            work.devices = names
            return True
        kept = None
        if self._may_reserve(work, run_s):
            kept = self._ledger.kept.reserve(request, ask, waited_s, work.reserved, work.task)
        work.reserved = kept.devices if kept is not None and kept.is_hard else ()
        if request.gpu_wait_s_max and waited_s < request.gpu_wait_s_max:
            self.due_s = min(self.due_s, work.arrived_s + request.gpu_wait_s_max)
        return False
