"""The smallest change to a waiting task with which it would start now: one flag, tried on every node.

Changes that cost the user nothing come first (wait for any GPU, state the memory), then a little less of what was asked for,
then where it may run; to go before others comes last. Only single changes are tried, and only those that `WaitReasons` is
sure of are told.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from peerload.core.resources.devices import DeviceRequest
from peerload.model.devices import GPU, MIB, GpuShare, GpuWait

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from peerload.core.explain.reasons import WaitReasons
    from peerload.core.node import Node
    from peerload.model.resources import Placement, ResourceRequest
    from peerload.model.task import TaskSpec

    Told = tuple[str, dict[str, object]]

TRIED_MAX = 4
"""Smaller amounts of one thing that are tried, the largest first."""
FEWER_MAX = 8
"""GPUs fewer that are tried."""
STEP = 10
"""Amounts are rounded down to tenths."""
GIB = 1 << 30


class Suggestion(msgspec.Struct, frozen=True, gc=False):
    """What to change, as it is typed, and where the task would start then."""

    words: str
    node: str


def smallest_change(node: Node, reasons: WaitReasons, spec: TaskSpec) -> Suggestion | None:
    """The first change that is sure to help; None if no single one is."""
    for same in (*_other_gpus(node, spec.request), *_less(node, spec.request)):
        asking = [
            (words, msgspec.structs.replace(spec, request=msgspec.structs.replace(spec.request, **changes)))
            for words, changes in same
        ]
        if len(asking) > 1 and not reasons.has_room(asking[-1][1]):
            continue  # where the most that it could do without does not help, less does not
        for words, changed in asking:
            if name := reasons.has_room(changed):
                return Suggestion(words, name)
    for words, changes in _elsewhere(spec.placement):
        changed = msgspec.structs.replace(spec, placement=msgspec.structs.replace(spec.placement, **changes))
        if name := reasons.has_room(changed):
            return Suggestion(words, name)
    highest = max((work.spec.priority for work in islice(node.queue.oldest_first(), 1)), default=spec.priority)
    name = reasons.has_room_here(spec, ignores_turn=True)
    return Suggestion(f"with --prio {highest + 1}", name) if name else None


def _other_gpus(node: Node, request: ResourceRequest) -> Iterator[list[Told]]:
    """Other GPUs, or less of them; each kind of change by itself, what takes the least away first."""
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


def _less(node: Node, request: ResourceRequest) -> Iterator[list[Told]]:
    """Fewer cores, less memory."""
    yield [(f"with -c {cpus:g}", {"cpus": cpus}) for cpus in _cores(node, request.cpus)]
    memory = _memory(node, request.mem_bytes)
    yield [(f"with --mem {mem_bytes / GIB:g}G", {"mem_bytes": mem_bytes}) for mem_bytes in memory]


def _elsewhere(placement: Placement) -> Iterator[Told]:
    """More nodes."""
    if placement.local:
        yield "without --local", {"local": False}
    if placement.node:
        yield f"without -w {placement.node}", {"node": None}
    for name in placement.exclude[:FEWER_MAX]:
        yield f"without -x {name}", {"exclude": tuple(other for other in placement.exclude if other != name)}
    for label in placement.labels[:FEWER_MAX]:
        yield f"without -C {label}", {"labels": tuple(other for other in placement.labels if other != label)}


def _largest(amounts: Iterable[float], below: float) -> list[float]:
    """The largest different amounts below this, in tenths."""
    rounded = {math.floor(amount * STEP) / STEP for amount in amounts}
    return sorted((amount for amount in rounded if 0 < amount < below), reverse=True)[:TRIED_MAX]


def _gpu_memory(node: Node, request: ResourceRequest) -> list[int]:
    """Less memory of each GPU than it asks for, or any where it asks for none in particular."""
    ledger = node.ledger
    if request.gpu_fraction < 1.0 or request.gpu_share is GpuShare.EXCLUSIVE:
        return []
    free = [state.free_bytes(ledger.now_s) for state in ledger.devices.of_kind(GPU) if state.reading.health.is_usable]
    for peer in node.membership:
        heard = node.membership.last_report(peer.identity.node)
        marks = {device.mark for device in peer.profile.devices if device.kind == GPU}
        if heard is not None and marks:
            free += [load.free_mib * MIB for load in heard.report.devices if load.mark in marks]
    asked = request.gpu_mem_bytes / GIB or math.inf
    return [int(amount * GIB) for amount in _largest((size / GIB for size in free), asked)]


def _cores(node: Node, asked: float) -> list[float]:
    """Fewer cores than it asks for."""
    free = [node.ledger.profile.cpus - node.ledger.cpus_running]
    for peer in node.membership:
        heard = node.membership.last_report(peer.identity.node)
        if heard is not None:
            profile, n = peer.profile, heard.report.load_tasks
            free.append(profile.cpus - n * profile.cpus / max(profile.slots, 1))
    return _largest(free, asked)


def _memory(node: Node, asked: int) -> list[int]:
    """Less memory than it asks for. That of others is not told."""
    ledger = node.ledger
    free = (ledger.profile.mem_bytes - ledger.mem_promised_bytes) / GIB
    return [int(amount * GIB) for amount in _largest([free], asked / GIB)] if ledger.profile.mem_bytes else []
