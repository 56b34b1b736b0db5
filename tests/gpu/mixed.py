"""The mixed trace: CPU tasks and GPU tasks of many sizes, on six nodes with sixteen GPUs of two models.

Three of five tasks ask for cores alone, two of five for GPUs: for a part of one, for one with little or much memory or of
unknown need, for one alone, for two, for four. They come in bursts of one command, as people submit them, at nodes of which
some see more users than others, and which could run them (for a node that keeps its own tasks must). How long a command
takes varies by a factor of about two; how much memory it has of a GPU is most of what it asked for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from peerload.core.resources.admission import why_never
from peerload.core.resources.devices import DeviceLedger
from peerload.model.config import GpuConfig
from peerload.model.resources import MIB, Device, GpuShare, Nearness, Placement, Profile, ResourceRequest
from tests.gpu.device_model import DeviceArrival

GIB = 1 << 30
TASKS = 600
LOAD = 1.2
"""Work that comes, of what all GPUs could do one task at a time, while tasks come."""
BURST_MEAN = 6.0
SPREAD = 0.45
"""Of durations: the standard deviation of their logarithm."""
GPU_SHARE = 0.4
USED = (0.6, 0.98)
"""How much a task has of the memory that it asked for."""
NODES = (
    # cores, GPUs, GiB of each, model, how often users sit there
    (32, 4, 80, "A100-80G", 0.30),
    (32, 4, 80, "A100-80G", 0.20),
    (24, 2, 24, "A10-24G", 0.15),
    (16, 2, 24, "A10-24G", 0.15),
    (16, 2, 24, "A10-24G", 0.10),
    (8, 2, 24, "A10-24G", 0.10),
)


class Kind(msgspec.Struct, frozen=True):
    """A command. weight: how many of its class are of this kind; median_s: of its durations; unknown_bytes: what it has of
    each GPU, where it does not say what it needs."""

    command: str
    weight: float
    median_s: float
    request: ResourceRequest
    unknown_bytes: int = 0


def _gpu(command: str, weight: float, median_s: float, cpus: float, gib: float = 0.0, **more: Any) -> Kind:
    more.setdefault("gpus", 1)
    unknown_bytes = more.pop("unknown_bytes", 0)
    request = ResourceRequest(cpus, gpu_mem_bytes=int(gib * GIB), **more)
    return Kind(command, weight, median_s, request, unknown_bytes)


CPU_KINDS = (
    Kind("compile", 0.45, 60.0, ResourceRequest(1.0)),
    Kind("evaluate", 0.30, 180.0, ResourceRequest(2.0)),
    Kind("simulate", 0.15, 420.0, ResourceRequest(4.0)),
    Kind("render", 0.10, 600.0, ResourceRequest(8.0)),
)
GPU_KINDS = (
    _gpu("infer", 0.20, 90.0, 1.0, gpu_fraction=0.25, unknown_bytes=4 * GIB),
    _gpu("notebook", 0.10, 400.0, 1.0, 4.0),
    _gpu("train-small", 0.20, 300.0, 2.0, 9.0),
    _gpu("train-whole", 0.12, 500.0, 2.0, 18.0),
    _gpu("train-large", 0.10, 600.0, 4.0, 60.0),
    _gpu("untold", 0.10, 240.0, 2.0, unknown_bytes=7 * GIB),
    _gpu("bench-alone", 0.05, 200.0, 2.0, 8.0, gpu_share=GpuShare.EXCLUSIVE),
    _gpu("train-pair", 0.08, 500.0, 4.0, 18.0, gpus=2),
    _gpu("train-four", 0.05, 700.0, 8.0, 40.0, gpus=4),
)


def profiles(nodes: Sequence[tuple[int, int, int, str, float]] = NODES, *, are_read: bool = True) -> list[Profile]:
    """The nodes n1 … ``are_read``: there are readings of their GPUs; two by two these are near."""
    made = []
    for number, (cores, count, gib, model, _) in enumerate(nodes, 1):
        names = [f"nvidia:GPU-{number}-{index}" for index in range(count)]
        devices = tuple(
            Device(name, index=index, model=model, mem_bytes=gib * GIB, is_read=are_read, links=_links(names, index))
            for index, name in enumerate(names)
        )
        made.append(Profile(f"n{number}", cores, float(cores), gpus=count, devices=devices))
    return made


def _links(names: Sequence[str], index: int) -> tuple[tuple[str, int], ...]:
    return tuple(
        (name, int(Nearness.NVLINK if other // 2 == index // 2 else Nearness.NODE))
        for other, name in enumerate(names)
        if other != index
    )


def mixed(tasks: int, seed: int, load: float = LOAD) -> list[DeviceArrival]:
    """So many tasks, in the order in which they come; equal for equal seeds."""
    rng = random.Random(f"mixed {seed}")
    homes = _homes()
    bursts: list[tuple[str, Kind, list[float]]] = []
    for kinds, count in ((GPU_KINDS, round(tasks * GPU_SHARE)), (CPU_KINDS, tasks - round(tasks * GPU_SHARE))):
        left = count
        while left:
            kind = rng.choices(kinds, [one.weight / _mean(one) for one in kinds])[0]
            size = min(1 + int(rng.expovariate(1.0 / max(_mean(kind) - 0.5, 0.5))), left)
            home = rng.choices(*homes[kind.command])[0]
            bursts.append((home, kind, [kind.median_s * math.exp(rng.gauss(0.0, SPREAD)) for _ in range(size)]))
            left -= size
    rng.shuffle(bursts)
    gpus = sum(count for _, count, *_ in NODES)
    work_s = sum(kind.request.gpus * kind.request.gpu_fraction * math.fsum(seconds) for _, kind, seconds in bursts)
    return list(_in_time(bursts, work_s / (gpus * load), rng))


def _mean(kind: Kind) -> float:
    """How many are submitted at once: the larger each is, the fewer."""
    return BURST_MEAN / max(kind.request.gpus, kind.request.cpus / 4, 1)


def _in_time(bursts: list[tuple[str, Kind, list[float]]], span_s: float, rng: random.Random) -> Iterator[DeviceArrival]:
    moments = sorted(rng.uniform(0.0, span_s) for _ in bursts)
    for at_s, (home, kind, durations) in zip(moments, bursts, strict=True):
        asked = kind.request.gpu_mem_bytes or kind.unknown_bytes
        for seconds in durations:
            yield DeviceArrival(
                at_s,
                home,
                seconds,
                cpus=kind.request.cpus,
                gpus=kind.request.gpus,
                request=kind.request,
                command=kind.command,
                gpu_bytes=int(asked * rng.uniform(*USED)) // MIB * MIB,
            )


def _homes() -> dict[str, tuple[list[str], list[float]]]:
    """command → the nodes that could run it, and how often it comes to each."""
    told = [
        msgspec.structs.replace(profile, devices=DeviceLedger(profile, GpuConfig()).advertised())
        for profile in profiles()
    ]
    homes = {}
    for kind in (*CPU_KINDS, *GPU_KINDS):
        able = [
            (profile.node, NODES[number][-1])
            for number, profile in enumerate(told)
            if not why_never(profile, kind.request, Placement(), profile.node)
        ]
        homes[kind.command] = [name for name, _ in able], [weight for _, weight in able]
    return homes
