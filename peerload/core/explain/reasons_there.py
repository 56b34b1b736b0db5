"""Whether another node has room for a task now, as far as its profile and its newest report tell.

True only where that node, if it stood as it told, would accept an offer and start it; None where what it told does not
decide that: how much memory is promised there is not told, nor which devices those have in mind that wait there. A device
that is kept there for one that waits is told as taken, also where a small task could start on it meanwhile.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from peerload.core.explain.reasons_here import GIB, duration_words
from peerload.core.resources.admission import EPSILON
from peerload.core.resources.devices import DeviceRequest
from peerload.core.resources.placement import is_meant
from peerload.model.config import GpuConfig
from peerload.model.devices import GPU, MIB, DeviceMode, GpuWait
from peerload.model.load import Region

if TYPE_CHECKING:
    from peerload.model.devices import Device, DeviceLoad
    from peerload.model.load import LoadReport
    from peerload.model.resources import Profile, ResourceRequest

Told = tuple[bool | None, str]


def room_told(profile: Profile, report: LoadReport, request: ResourceRequest) -> Told:
    """Whether it has room now, and what it told of that, in words."""
    if report.region is Region.UNDERLOADED and not report.accepts:
        return False, "it takes no tasks of others now"
    cores, cores_words = _cores(profile, report, request)
    if not request.takes_devices:
        return cores, cores_words
    devices, words = _devices(profile, report, request)
    if devices is False or cores is not False:
        return (None if devices and cores is None else devices), words
    return False, f"{words}; {cores_words}"


# -- cores and memory --------------------------------------------------------------------------------------------------


def _cores(profile: Profile, report: LoadReport, request: ResourceRequest) -> Told:
    n, slots = report.load_tasks, max(profile.slots, 1)
    stands = f"{n} of {slots} slot{'' if slots == 1 else 's'} taken"
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
    if request.mem_bytes and profile.mem_bytes and report.running:
        return None, f"{stands}; how much memory is promised there is not told"
    least, most = _cpus_free(profile, report)
    if request.cpus <= least + EPSILON:
        return True, f"room: {stands}"
    if request.cpus > most + EPSILON:
        return False, f"about {most:g} of {profile.cpus:g} cpus free, asked {request.cpus:g}"
    return None, f"{least:g} to {most:g} of {profile.cpus:g} cpus free, asked {request.cpus:g}"


def _cpus_free(profile: Profile, report: LoadReport) -> tuple[float, float]:
    """At least and at most so many cores are free: n is told in slots, rounded up."""
    each = profile.cpus / max(profile.slots, 1)
    least = max(profile.cpus - report.load_tasks * each, 0.0)
    if profile.slots_fixed or report.load_tasks <= 1:
        return least, profile.cpus
    return least, min(least + each, profile.cpus)


def _cores_beside_devices(profile: Profile, report: LoadReport, request: ResourceRequest, stands: str) -> Told:
    """Of a task that takes devices: it does not wait behind those that wait for cores, and what runs is all that counts."""
    if profile.slots_fixed and report.running >= profile.slots:
        return False, f"full: {stands}"
    if request.mem_bytes and profile.mem_bytes and report.running:
        return None, "how much memory is promised there is not told"
    least, _ = _cpus_free(profile, report)
    is_sure = report.load_tasks < profile.slots and request.cpus <= least + EPSILON and not report.waiting
    return (True if is_sure else None), stands


# -- devices -----------------------------------------------------------------------------------------------------------


def _devices(profile: Profile, report: LoadReport, request: ResourceRequest) -> Told:
    loads = {load.mark: load for load in report.devices}
    is_sure = not report.waiting and report.gpu_tasks <= sum(load.tasks for load in report.devices)
    for kind, count in request.devices:
        told = [loads.get(device.mark) for device in profile.devices if device.kind == kind]
        free = sum(load is not None and load.is_free for load in told)
        if free < count:
            return False, f"{len(told) - free} of {len(told)} {kind} busy, asked {count}"
    if not request.gpus:
        return (True if is_sure else None), _waits(report, f"room: {', '.join(kind for kind, _ in request.devices)}")
    gpus = [device for device in profile.devices if device.kind == GPU]
    if not gpus:
        is_free = report.gpus_free >= request.gpus
        return is_free and (is_sure or None), _waits(report, f"{report.gpus_free} of {profile.gpus} GPUs free")
    if request.gpu_prefer and request.gpu_wait is GpuWait.QUEUE:
        gpus = [gpu for gpu in gpus if any(is_meant(gpu, name) for name in request.gpu_prefer)]
    ask = DeviceRequest(request, GpuConfig())
    rooms = [_has_room(gpu, loads.get(gpu.mark), ask) for gpu in gpus]
    words = _words(gpus, loads, request, ask, rooms)
    sure, possible = rooms.count(True), len(rooms) - rooms.count(False)
    if possible < request.gpus:
        return False, words
    if sure < request.gpus:
        return None, f"{words}; whether there is room beside the others is not told"
    return (True if is_sure else None), _waits(report, words)


def _waits(report: LoadReport, words: str) -> str:
    return f"{words}; {report.waiting} wait there already" if report.waiting else words


def _has_room(gpu: Device, load: DeviceLoad | None, ask: DeviceRequest) -> bool | None:
    """Whether this GPU has room for the task; None: that depends on what is not told."""
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
        could = ask.need_bytes is not None or load.free_percent + 1 >= percent  # that was rounded down
        return True if load.free_percent >= percent else None if could else False
    if not load.free_slots:
        return False
    return True if gpu.mem_bytes else None


def _words(
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
    return f"{words}; one is free in about {duration_words(min(etas))}" if etas else words
