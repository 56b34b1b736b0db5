"""Admission: which nodes could ever run a task (by profile), what fits on this node now (by the ledger), how a task that asks for
GPUs sees other nodes, and the line of tasks that wait for devices.
"""

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
"""The placement of a task that its user leaves to the policies."""


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
    """The reason as far as the wishes of its user go."""
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
        return f"it has nothing that builds its environment: {BUILDERS[placement.builder]}"
    return ""


def under_cap_text(power: PowerCurve, cpus: float) -> str:
    """Cores that its power cap leaves to tasks."""
    return f"{power.threads_under_cap(cpus):g} cpus under its power cap ({power.cap_w:g} W)"


def _why_no_devices(profile: Profile, request: ResourceRequest) -> str:
    """The reason as far as devices go."""
    for kind, count in request.devices:
        found = sum(device.kind == kind for device in profile.devices)
        if found < count:
            return f"{found} {kind}, asked {count}" if found else f"no {kind}"
    if not request.gpus:
        return ""
    if not profile.gpus:
        return "no GPU"
    gpus = [device for device in profile.devices if device.kind == GPU]
    if not gpus:  # only how many there are is known
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
    """The memory that a task asks of this GPU, 0 = not known: what it says, or its part of all that the GPU has."""
    if request.gpu_mem_bytes or request.gpu_fraction >= 1.0:
        return request.gpu_mem_bytes
    return int(gpu.mem_bytes * request.gpu_fraction)


def _most_bytes(gpu: Device) -> int:
    """The memory of it that one task can have."""
    return gpu.grantable_bytes or gpu.mem_bytes


def gpu_mem_bytes_max(profile: Profile, request: ResourceRequest, placement: Placement, home: str) -> int | None:
    """The memory of each GPU that a node could ever give this task: 0 if it cannot run there at all, None if nobody knows
    how much there is."""
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
    """The GPUs of a node as text: ``8 x 48 GiB``; of different ones each."""
    sizes: dict[int, int] = {}
    for gpu in gpus:
        sizes[gpu.mem_bytes] = sizes.get(gpu.mem_bytes, 0) + 1
    known = " and ".join(f"{count} x {_gib(size)}" for size, count in sizes.items() if size)
    return known or f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 1 << 30 else f"{size / 2**20:.3g} MiB"


def asked_of(state: CoreState, work: Work, profile: Profile | None = None) -> ResourceRequest:
    """The effective request of work to other nodes, which may know nothing of its command: with the memory of each GPU that the
    command needs where that was not stated but is known here. ``profile``: of the node that is asked, None = any; of one that
    could not promise so much a GPU is asked for where nobody else is, as the request has it."""
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
"""A GPU with so many tasks is crowded, as far as other nodes know."""


def seen_by(request: ResourceRequest, report: LoadReport) -> LoadReport:
    """A node's report in the terms of this task. To one that asks for GPUs, loads are in GPUs instead of slots, and a node
    accepts where it has room now: so every policy that compares nodes by their tasks and slots places such tasks by GPUs,
    without knowing of any."""
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
    """True if a node has room for its GPUs and cores, as far as its report tells."""
    if request.cpus > report.cpus_free + EPSILON:
        return False
    if report.gpus_free >= request.gpus:
        return True
    gpus = report.devices[: report.gpus]  # they come first
    return sum(_could_join(request, device) for device in gpus) >= request.gpus


def has_memory(request: ResourceRequest, profile: Profile, requested_bytes: int) -> bool:
    """True if a node has the memory for it beside so much that others asked for."""
    return not (profile.mem_bytes and request.mem_bytes) or requested_bytes + request.mem_bytes <= profile.mem_bytes


def cpus_free_there(profile: Profile, report: LoadReport) -> tuple[float, float]:
    """Bounds of the cores that no task of a node asks for, by its report: n is told in slots, rounded up."""
    cpus = profile.cpus if profile.power is None else profile.power.threads_under_cap(profile.cpus)
    each = profile.cpus / max(profile.slots, 1)
    least = max(cpus - report.load_tasks * each, 0.0)
    if report.cpus_free < LOAD_MAX and not report.waiting:
        least = max(report.cpus_free - (profile.cpus - cpus) - report.slots_foreign * each, least)
    if profile.slots_fixed or report.load_tasks <= 1:
        return least, cpus
    return least, min(least + each, cpus)


def claims_room(request: ResourceRequest, profile: Profile, report: LoadReport) -> bool:
    """True if a node says by its report that it would take such a task: it has room, or lets tasks wait."""
    if request.takes_devices:
        return request.gpus > 0 and has_room(request, report)
    if not report.accepts or report.load_tasks >= profile.slots:
        return report.accepts
    has_cores = request.cpus <= cpus_free_there(profile, report)[0] + EPSILON
    return has_cores and has_memory(request, profile, report.mem_requested_bytes)


def slots_of(request: ResourceRequest, profile: Profile) -> int:
    """Slots of a node that a task is worth, at least one."""
    return max(ceil(request.cpus * profile.slots / profile.cpus - EPSILON), 1) if profile.cpus > 0 else 1


def offers_good_gpus(request: ResourceRequest, profile: Profile, report: LoadReport | None) -> bool:
    """True if another node has room on GPUs that are not crowded, and that are of those that the task prefers, if it prefers
    any. A number is a preference among the GPUs of its home. ``report``: the node's load, None = not known: then it may."""
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
    """True if a task could start on this GPU: a free one, or one in use if the task shares and its need is known."""
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
    """The number of ``slots`` that foreign programs occupy if they keep ``cores`` of ``cpus`` busy; ``before``: as of the last time.

    The sensors tell foreign load averaged over 15 s. Here it is rounded to slots with hysteresis, so that a load that hovers
    around half a slot does not change what is told to others. Foreign slots count in n: in the load index, in the acceptance
    test and in every report. They never keep a task of this node from starting here, else a busy workstation would hang.
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
"""Tasks that may wait for devices, or be on their way to them, before there is no room for one more."""


class Ledger:
    """The tasks of this node by what they hold: running, waiting, and inbound (accepted or promised, on its way).

    n counts all three, and the slots that foreign programs occupy. It is the number of tasks in units of slots: where a
    task asks for several cores it counts for as many slots as these are worth, and where the number of slots was not set
    by hand, half a core counts for half.
    Tasks that wait for devices are left out of n: they keep nobody from the cores.
    version grows with every change, so that whoever has looked knows whether there is anything new to see.
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
        """Devices that are kept for those who wait for them here."""
        self.running: dict[str, tuple[ResourceRequest, bool]] = {}
        self.inbound: dict[bytes, ResourceRequest] = {}
        self.running_local = 0
        self.waiting = 0
        self.waiting_local = 0
        self.waiting_remote = 0
        self.cpus_running = 0.0
        """Cores held by what runs."""
        self._cpus_waiting = 0.0
        self.cpus_inbound = 0.0
        """Cores for what is on its way here."""
        self.mem_promised_bytes = 0
        """Memory promised to what runs."""
        self._mem_waiting_bytes = 0
        self.mem_inbound_bytes = 0
        """Memory for what is on its way here."""
        self._waiting_for_devices: dict[ResourceRequest, int] = {}
        self._device_waiters = 0
        self._gpus_waiting = 0.0
        self.cpus_requested = 0.0
        """Cores asked for by all of them, but for those that wait for devices."""
        self.foreign_slots = 0
        self.load_tasks = 0
        """n: running + waiting + inbound, in slots, and the foreign slots."""
        self.version = 0
        """Grows with every change of what is here."""
        self.load_version = 0
        """Grows with the version, with every other profile, and with every reading of the sensors: with all that the load depends on."""
        self.room_version = 0
        """Grows with every change of what runs."""
        self.now_s = 0.0
        """This moment, for what devices are expected to do."""

    def _changed(self) -> None:
        """Update n after every change, since n is read far more often than it changes."""
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
        """n if one such task, which waits here, did not."""
        if request.takes_devices:
            return self.load_tasks
        return self._in_slots(self._count - 1, self.cpus_requested - self.cores_of(request)) + self.foreign_slots

    def set_profile(self, profile: Profile) -> None:
        self.profile = profile
        self.load_version += 1

    def set_foreign_slots(self, slots: int) -> None:
        """Foreign programs occupy so many slots from now on."""
        if slots != self.foreign_slots:
            self.foreign_slots = slots
            self._changed()

    @property
    def _count(self) -> int:
        """Number of tasks without those that wait for devices."""
        return len(self.running) + self.waiting - self._device_waiters + len(self.inbound)

    @property
    def mem_requested_bytes(self) -> int:
        """Memory asked for by all tasks, but for those that wait for devices."""
        return self.mem_promised_bytes + self.mem_inbound_bytes + self._mem_waiting_bytes

    def has_memory_beside_all(self, request: ResourceRequest) -> bool:
        """True if its memory would be free if everything waiting and inbound were running."""
        return has_memory(request, self.profile, self.mem_requested_bytes)

    @property
    def is_oversubscribed(self) -> bool:
        """True if the tasks here cannot all run at once for want of memory, or under the power cap, whatever slots are free."""
        most_bytes = self.profile.mem_bytes
        return 0 < most_bytes < self.mem_requested_bytes or self.exceeds_cap(self.cpus_requested)

    @property
    def is_full(self) -> bool:
        """True if nothing more can be started now, whatever it asks for."""
        return self.profile.slots_fixed and len(self.running) >= self.profile.slots

    def fits(self, request: ResourceRequest) -> bool:
        """True if it could be started now beside what is running, after all that waits for devices."""
        return self.has_cores(request) and (not request.takes_devices or self._has_devices(request, leaves_kept=True))

    def has_good_devices(self, request: ResourceRequest) -> bool:
        """True if it could start now on GPUs that are not crowded, and that are of those that it prefers, if it prefers any."""
        if request.gpu_prefer:
            request = msgspec.structs.replace(request, gpu_wait=GpuWait.QUEUE, gpu_wait_s_max=0.0)
        return self._has_devices(request, leaves_kept=True, activity_max=CROWDED)

    @property
    def cpus_free(self) -> float:
        """Cores that neither what runs nor what comes has."""
        return max(self.profile.cpus - self.cpus_running - self.cpus_inbound, 0.0)

    def has_cores(self, request: ResourceRequest) -> bool:
        """True if its cores and memory are free now."""
        return self._fits(request, len(self.running), self.cpus_running)

    def fits_beside_all(self, request: ResourceRequest) -> bool:
        """True if it could be started now if everything waiting and inbound were running too, beside the foreign load. One
        that takes devices asks no more of cores than what runs and comes leaves, since it does not wait behind those that
        wait for cores."""
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
        """True if its devices are free, also when the others, as far as there is room for them, have theirs; and the
        attempts ``without`` none. ``leaves_kept``: what is kept for one that waits here is not free; ``activity_max``: nor is
        one with more work than this, its own counted."""
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
        """True if it could be started now if these attempts held nothing."""
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
        """Cores that a task has for sure while it runs here."""
        if request.overcommit and self.profile.enforces_cores:
            return request.cpus * OVERCOMMIT_SHARE
        return request.cpus

    def recount(self, waiting: Iterable[Work]) -> None:
        """Other cores count for the same requests than before."""
        self.cpus_running = sum((self.cores_of(request) for request, _ in self.running.values()), 0.0)
        self.cpus_inbound = sum(map(self.cores_of, self.inbound.values()), 0.0)
        requests = ((work.spec.request, work.count) for work in waiting)
        self._cpus_waiting = sum((n * self.cores_of(one) for one, n in requests if not one.takes_devices), 0.0)
        self._changed()

    def exceeds_cap(self, cpus: float) -> bool:
        """True if this node would take more power than tasks may have it take, with so many cores busy."""
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
        """Book the resources of a starting attempt, and these devices. run_s: the time it takes with high probability;
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
        """n in GPUs: how many all tasks here ask for."""
        asked = [request for request, _ in self.running.values()]
        asked += self.inbound.values()
        return math.ceil(self._gpus_waiting + sum(one.gpus * one.gpu_fraction for one in asked if one.gpus) - EPSILON)

    @property
    def waits_for_devices(self) -> bool:
        """True if any task here does."""
        return bool(self._waiting_for_devices)

    def wait(self, request: ResourceRequest, *, is_local: bool, by: int = 1) -> None:
        """A task joins (by=1) or leaves (by=-1) those waiting here."""
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
        """A task is on its way here; one that was promised before is known better by now."""
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
"""Different requests of one scope that are tried one after the other: of those that wait for the same GPUs, or for any."""
LOOKED_AT_IN_ALL_MAX = 256
PASSED_MAX = 1024
"""Tasks of one scope that are looked at in all; those that ask the same as one before are passed by."""
SKIPPED_MAX = 16_384
"""Tasks in line that are gone through in all: those of a scope that was looked at for long enough are skipped."""
LineScope = tuple[tuple[str, ...] | None, tuple[str, ...]]
"""The GPUs that it waits for, () = any, None = it takes none; and its other kinds of devices."""
ANY_GPU: LineScope = ((), ())


class DeviceQueue:
    """Order in which tasks that wait for devices start, and what is kept for whom. One per queue.

    They are looked at in order. One that fits starts; for one that does not, devices are reserved (`Backfill`), and later ones
    start only where that does no harm. One whose devices are free but not the cores that it asks for has the next cores that
    come free.

    due_s: when a task that waits for certain GPUs will take others, infinite = never; lacks_cores: of
    each priority the first whose devices are free, but not the cores that it asks for; depends_on_cores: whether one might
    start if there were others.
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
        """True if nothing was looked at since the last `begin`."""

    def begin(self) -> None:
        """A new look at all that waits; nothing is reserved so far."""
        self.is_idle = True
        if self._ledger.kept.seen:  # else nothing is kept
            self._ledger.kept = Backfill(self._ledger.devices, self._ledger.now_s)
        self._failed.clear()
        self._looked_at.clear()
        self.lacks_cores.clear()
        self.depends_on_cores = False
        self.due_s = NEVER_S

    def is_overdue(self, work: Work) -> bool:
        """True if it has waited so long that nobody may overtake it."""
        return self._ledger.now_s - work.arrived_s >= self._ledger.devices.config.starve_after_s

    def first_that_fits(self, priority: int, line: Iterable[Work], before: Work | None) -> Work | None:
        """The first that may start now, with its devices. ``before``: only those that came earlier than this one may
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
        """Key of its request, alike for all that ask the same now; how long it runs at most, as far as that is known; what is
        known of its need."""
        request, models = work.spec.request, self._ledger.devices.models
        run_s = self._state.run_s_max(work, models)
        learned = self._state.learned_gpu_bytes(work, models)
        waits_s = request.gpu_wait_s_max
        is_over = bool(waits_s) and self._ledger.now_s - work.arrived_s >= waits_s
        return (request, run_s, is_over, tuple(learned.items())), run_s, learned

    def _may_reserve(self, work: Work, run_s: float, *, is_soft_too: bool = True) -> bool:
        """True if devices may be reserved for it beside the hardened reservations."""
        kept = self._ledger.kept
        is_hard = kept.is_hard(run_s, self._ledger.now_s - work.arrived_s)
        return bool(work.reserved) or ((is_hard or is_soft_too) and kept.may_reserve(is_hard=is_hard))

    def _fits(self, work: Work, run_s: float, learned: Mapping[str, int]) -> bool:
        """True if its devices are free; if not, some are kept for it."""
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
