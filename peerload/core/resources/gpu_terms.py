"""The load of nodes as a task that asks for GPUs sees it: in GPUs instead of slots, and accepted where it has room now.

So every policy that compares nodes by their tasks and slots places such tasks by GPUs, without knowing of any.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from peerload.core.resources.devices import EPSILON
from peerload.core.resources.placement import is_meant
from peerload.model.devices import GPU, MIB, GpuShare

if TYPE_CHECKING:
    from peerload.model.devices import DeviceLoad
    from peerload.model.load import LoadReport
    from peerload.model.resources import Profile, ResourceRequest

CROWD_MIN = 3
"""A GPU with so many tasks is crowded, as far as other nodes know."""


def seen_by(request: ResourceRequest, report: LoadReport) -> LoadReport:
    """A node's report in the terms of this task."""
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


def offers_good_gpus(request: ResourceRequest, profile: Profile, report: LoadReport | None) -> bool:
    """True if another node has room on GPUs that are not crowded, and that are of those that the task prefers, if it prefers
    any. A number is a preference among the GPUs of its home. ``report``: the node's load, None = not known: then it may."""
    gpus = [device for device in profile.devices if device.kind == GPU]
    if request.gpu_prefer:
        names = [name for name in request.gpu_prefer if not name.isdecimal()]
        gpus = [gpu for gpu in gpus if any(is_meant(gpu, name) for name in names)]
    if len(gpus) < request.gpus or report is None or not report.devices:
        return len(gpus) >= request.gpus
    if request.cpus > report.cpus_free + EPSILON:
        return False
    loads = {load.mark: load for load in report.devices}
    told = [loads[gpu.mark] for gpu in gpus if gpu.mark in loads]
    return sum(load.tasks < CROWD_MIN and _could_join(request, load) for load in told) >= request.gpus


def _could_join(request: ResourceRequest, device: DeviceLoad) -> bool:
    """On a GPU that others use: only a task whose need is known, and that shares."""
    if device.is_free:
        return True
    if request.gpu_share is GpuShare.EXCLUSIVE or device.free_mib * MIB < request.gpu_mem_bytes:
        return False
    if request.gpu_fraction < 1.0:
        return device.free_percent >= math.ceil(request.gpu_fraction * 100)
    return request.gpu_mem_bytes > 0 and device.free_slots > 0
